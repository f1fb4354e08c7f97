# SPDX-License-Identifier: Apache-2.0
"""`lockstep.audit.start()` and `stop()`, and that nothing of torch stays replaced."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.jit import _builtins
from torch.nn.modules import module
from torch.optim import optimizer
from torch.utils.data import DataLoader

import lockstep.audit
from lockstep.audit import session
from lockstep.audit.ledger import Ledger
from lockstep.audit.probe.evaluations import saved_buffers
from lockstep.audit.probe.patches import Patches
from lockstep.errors import WrongUseError


def _what_could_be_replaced():
    owners = [
        dist,
        dist.distributed_c10d,
        torch,
        torch.autograd,
        torch.nn.utils,
        torch.nn.utils.clip_grad,
        torch.nn.functional,
        torch.optim.Optimizer,
        torch.amp.GradScaler,
        torch.nn.parallel.DistributedDataParallel,
        torch.utils.data.dataloader._BaseDataLoaderIter,
    ]
    held = {(id(o), name): value for o in owners for name, value in list(vars(o).items())}
    hooks = [
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        len(module._global_forward_pre_hooks),
    ]
    return held, hooks


def _train(steps=3):
    source = torch.Generator().manual_seed(0)
    net = torch.nn.Linear(4, 2)
    made = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        made.zero_grad()
        net(torch.randn(5, 4, generator=source)).square().mean().backward()
        made.step()


def test_one_process_that_trains_is_fine_and_torch_is_as_before():
    # Optimizers replace `step` of their own class when the first of it is made; and torch.optim
    # imports its compiler.
    _train()
    held, hooks = _what_could_be_replaced()
    lockstep.audit.start(mode="full")
    assert _what_could_be_replaced()[1] != hooks
    _train()
    assert lockstep.audit.stop() == []
    after, hooks_after = _what_could_be_replaced()
    assert hooks_after == hooks
    assert [key for key, value in held.items() if after.get(key) is not value] == []


def test_an_exchange_of_ones_own_gives_findings():
    lockstep.audit.start()
    _train()
    findings = lockstep.audit.stop(exchange=lambda mine: [mine, None])
    assert "LS602" in {f.code for f in findings}


class _Untouchable(torch.Tensor):
    """Has a gradient, and refuses to be looked at by anybody but its optimizer."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.untyped_storage or "norm" in func.__name__:
            raise NotImplementedError("not for you")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_what_the_audit_cannot_look_at_does_not_stop_the_program():
    seen = []
    lockstep.audit.start(mode="full")
    try:
        weight = torch.nn.Parameter(torch.ones(3).as_subclass(_Untouchable))
        made = torch.optim.SGD([weight], lr=0.1, foreach=False)
        for _ in range(2):
            made.zero_grad()
            (weight * 2).sum().backward()
            made.step()
    finally:
        lockstep.audit.stop(exchange=lambda mine: seen.append(mine) or [mine])
    assert weight.tolist() == pytest.approx([0.6] * 3)
    unseen = Ledger.from_bytes(seen[0]).facts.unseen
    assert any("not for you" in line for line in unseen)


def test_starting_twice_and_stopping_what_never_started_is_refused():
    with pytest.raises(WrongUseError):
        lockstep.audit.stop()
    lockstep.audit.start()
    try:
        with pytest.raises(WrongUseError):
            lockstep.audit.start()
    finally:
        lockstep.audit.stop()


def _ledger_of(mode="full", steps=None, then=lambda: None):
    seen = []
    lockstep.audit.start(mode=mode, steps=steps)
    try:
        then()
    finally:
        lockstep.audit.stop(exchange=lambda mine: seen.append(mine) or [mine])
    return Ledger.from_bytes(seen[0])


def test_after_the_steps_that_were_asked_for_nothing_is_looked_at():
    looks = []

    def train_on():
        probe = session._running
        _train(steps=2)
        assert not probe.is_on
        assert not probe.detailed
        known = probe.harmlessly
        probe.harmlessly = lambda look, *args: looks.append(look.__name__) or known(look, *args)
        _train(steps=3)

    ledger = _ledger_of(steps=2, then=train_on)
    assert [track.count for track in ledger.tracks] == [2]
    assert ledger.facts.backwards == 2
    assert [look for look in looks if look not in ("_before_step", "_after_step")] == []


def _nested(layout):
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


@pytest.mark.filterwarnings("ignore")  # torch's own, about what it calls a prototype or outdated
@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.zeros(4).to(torch.float8_e4m3fn) for _ in range(4)],
        lambda: torch.zeros(4).to(torch.float8_e5m2),
        lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        lambda: _nested(torch.strided),
        lambda: _nested(torch.jagged),
        lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: [torch.zeros(4, dtype=torch.complex64).conj()] * 4,
    ],
    ids=["float8", "float8 alone", "float4", "nested", "jagged", "quantised", "sparse", "complex"],
)
def test_batches_of_any_kind_reach_the_program(make):
    delivered = []

    def read():
        loader = DataLoader(range(8), batch_size=4, collate_fn=lambda _: make())
        delivered.extend(loader)

    ledger = _ledger_of(then=read)
    assert len(delivered) == 2
    assert len(ledger.loadings) == 1


def test_after_the_steps_that_were_asked_for_no_loader_is_written_down():
    def train_on():
        loader = DataLoader(torch.arange(8), batch_size=4)
        under_way = iter(loader)
        next(under_way)
        _train(steps=2)
        assert not session._running.is_on
        assert len(list(under_way)) == 1
        assert len(list(loader)) == 2

    ledger = _ledger_of(steps=2, then=train_on)
    assert [each.indices for each in ledger.loadings] == [[0, 1, 2, 3]]


@pytest.fixture
def alone():
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_a_collective_is_given_by_place_counts_as_by_name(alone):
    def train():
        weight = torch.nn.Parameter(torch.ones(3))
        made = torch.optim.SGD([weight], lr=0.1)
        (2 * weight).sum().backward()
        dist.reduce(weight.grad, 0, dist.ReduceOp.MAX, dist.group.WORLD, False)
        dist.all_reduce(weight.grad, dist.ReduceOp.MIN)
        made.step()

    (step,) = _ledger_of(then=train).tracks[0].steps
    assert [(c.op, c.reduction) for c in step.collectives] == [
        ("reduce", "MAX"),
        ("all_reduce", "MIN"),
    ]


def test_a_model_that_outlives_the_audit_does_not_keep_it(alone):
    def train():
        models.append(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2)))
        models[0].register_comm_hook(None, default_hooks.allreduce_hook)
        models[0](torch.ones(2, 4)).sum().backward()
        probes.append(weakref.ref(session._running))

    models, probes = [], []
    _ledger_of(then=train)
    gc.collect()
    assert probes[0]() is None
    models[0](torch.ones(2, 4)).sum().backward()


class _Nameless:
    """A sampler that tells nothing."""

    def __iter__(self):
        return iter(range(4))

    def __len__(self):
        return 4

    @property
    def num_replicas(self):
        raise RuntimeError("not known yet")


def test_a_loader_that_cannot_be_described_is_read_all_the_same():
    delivered = []
    ledger = _ledger_of(then=lambda: delivered.extend(DataLoader(range(4), sampler=_Nameless())))
    assert len(delivered) == 4
    assert any("not known yet" in line for line in ledger.facts.unseen)


class _Reader(torch.nn.Module):
    """Reads a loader while it runs, and has a part that is called."""

    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(4, 4)

    def forward(self, x):
        for batch in DataLoader(torch.ones(2, 4), batch_size=2):
            x = x + batch
        return self.part(x)


@pytest.mark.filterwarnings("ignore")  # torch.jit is called outdated
def test_what_is_traced_has_the_graph_that_it_has_without_the_audit():
    net, given = _Reader(), torch.ones(2, 4)

    def nodes():
        traced = torch.jit.trace(net, (given,), check_trace=False)
        return [node.kind() for node in traced.inlined_graph.nodes()]

    found = []
    expected = nodes()
    ledger = _ledger_of(then=lambda: found.extend(nodes()))
    assert found == expected
    assert ledger.facts.unseen == []


class _Joining(torch.nn.Module):
    def forward(self, x):
        return torch.cat([x, torch.stack([x, x]).sum(0)])


@pytest.mark.filterwarnings("ignore")  # torch.jit is called outdated
def test_what_is_scripted_calls_the_operators_that_are_watched_meanwhile():
    listed = dict(_builtins._get_builtin_table())
    calls = []

    def watch(original, *args, **kwargs):
        calls.append(original)
        return original(*args, **kwargs)

    patches = Patches()
    for name in ("cat", "stack"):
        patches.wrap_operator(name, watch)
    given = torch.ones(2)
    expected = _Joining()(given)
    assert len(calls) == 2
    assert torch.equal(torch.jit.script(_Joining())(given), expected)
    patches.undo()
    assert torch.equal(torch.jit.script(_Joining())(given), expected)
    assert len(calls) == 2
    assert _builtins._get_builtin_table() == listed


class _Prepared(torch.optim.Optimizer):
    """Stands before an optimizer, as Accelerate's does."""

    def __init__(self, made):
        self.optimizer = made

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        self.optimizer.step()


def _made_with_schedule(prepare=lambda made: made):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    made = prepare(torch.optim.SGD([weight], lr=0.1))
    return made, torch.optim.lr_scheduler.LambdaLR(made, lambda _: 1.0)


def test_torchs_warning_about_a_schedule_names_the_programs_line():
    def step_too_early():
        _, schedule = _made_with_schedule()
        with pytest.warns(UserWarning, match="before `optimizer.step") as told:
            schedule.step()
        files.extend(each.filename for each in told)

    files = []
    _ledger_of(then=step_too_early)
    assert files == [__file__]


def test_a_schedules_steps_are_counted_between_those_of_its_optimizer():
    def train():
        made, schedule = _made_with_schedule(_Prepared)
        other, still = _made_with_schedule()
        for _ in range(5):
            made.step()
            other.step()
            for _ in range(2):
                schedule.step()
        assert still.last_epoch == 0

    facts = _ledger_of(then=train).facts.schedules
    assert {key: (each.count, each.schedules) for key, each in facts.items()} == {"SGD#0": (8, 1)}
    assert facts["SGD#0"].where[0].function == "_made_with_schedule"


def test_a_local_modules_buffers_are_not_compared_whichever_tensor_stands_there():
    part = torch.nn.Module()
    part.register_buffer("state", torch.ones(2))
    lockstep.local(part)
    part.state = torch.zeros(2)
    model = torch.nn.Sequential(part, torch.nn.BatchNorm1d(2))
    assert [name for name, _ in saved_buffers(model)] == ["1.running_mean", "1.running_var"]
