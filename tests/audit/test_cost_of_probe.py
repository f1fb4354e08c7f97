# SPDX-License-Identifier: Apache-2.0
"""What a watched program pays for, counted: calls, transfers, bytes that are held."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep.audit
from lockstep.audit import session
from lockstep.audit.facts import Backward, Parameter, Track
from lockstep.audit.fingerprint import take
from lockstep.audit.ledger import FIRST_STEPS_WATCH
from lockstep.audit.packed import MOST_BYTES, SMALL, packed
from lockstep.audit.probe import (
    backwards,
    described,
    evaluations,
    models_sent,
    optimizers,
    scattered,
)
from lockstep.audit.probe.probe import Probe, Watched

_TRANSFERS = ("aten::_local_scalar_dense", "aten::item", "aten::equal")


class Counted(TorchDispatchMode):
    """What torch is asked to do, by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))

    def transfers(self):
        return sum(name in _TRANSFERS for name in self.calls)


def _probe_with(parameters):
    probe = Probe()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    described = [Parameter(f"p{n}", list(p.shape), "float32") for n, p in enumerate(parameters)]
    watched = Watched(optimizer, Track("SGD#0", "SGD", [], parameters=described))
    probe.optimizers[optimizer] = watched
    return probe, watched, optimizer


class CountedList(list):
    """How often somebody goes through it."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


def test_a_message_of_another_size_is_not_compared_with_each_parameter():
    probe, watched, kept = _probe_with([torch.nn.Parameter(torch.ones(3)) for _ in range(9)])
    watched.track.parameters = CountedList(watched.track.parameters)
    watched.parameters = CountedList(watched.parameters)
    probe.detailed = False
    with Counted() as counted:
        for _ in range(5):
            models_sent.note(probe, models_sent.SENDING, torch.ones(7))
    assert kept in probe.optimizers
    assert watched.track.parameters.reads == watched.parameters.reads == 0
    assert counted.transfers() == 0
    assert probe.ledger.facts.models_sent == []


@pytest.mark.parametrize(("share", "are_weights"), [(1.0, True), (0.5, True), (None, False)])
def test_whether_a_message_is_the_weights_takes_no_transfer_for_each(share, are_weights):
    source = torch.Generator().manual_seed(0)
    held = [torch.nn.Parameter(torch.randn(4, 3, generator=source)) for _ in range(20)]
    probe, _, kept = _probe_with(held)
    flat = torch.cat([p.detach().reshape(-1) for p in held])
    told = torch.randn(flat.shape, generator=source) if share is None else flat * share
    with Counted() as counted:
        models_sent.note(probe, models_sent.SENDING, told)
    assert kept in probe.optimizers
    (noted,) = probe.ledger.facts.models_sent
    assert (noted.size, noted.op, noted.weights) == (240, "send", are_weights)
    assert counted.transfers() == 0, "lists of numbers are read as a whole"


def test_small_tensors_are_put_side_by_side_a_megabyte_at_a_time():
    source = torch.Generator().manual_seed(0)
    tensors = [torch.randn(SMALL - n % 3, generator=source) for n in range(80)]
    sizes, places, alive = [], [], []
    for group in packed(tensors):
        sizes.append(group.buffer.nbytes)
        places += group.places
        alive.append(weakref.ref(group.buffer))
        del group
        assert sum(reference() is not None for reference in alive) == 0
    assert len(sizes) == 10
    assert max(sizes) <= MOST_BYTES
    assert places == list(range(80))


def test_tensors_in_several_buffers_have_the_fingerprints_that_each_has_alone():
    source = torch.Generator().manual_seed(0)
    tensors = [torch.randn(SMALL - n % 3, generator=source) for n in range(80)]
    together = take(tensors, [4] * 80)
    alone = [take([t], [4]) for t in tensors]
    assert together.hashes.tolist() == [int(each.hashes[0]) for each in alone]
    assert together.norms.tolist() == [float(each.norms[0]) for each in alone]
    assert together.samples.tolist() == [float(x) for each in alone for x in each.samples]


def test_how_long_the_gradients_are_takes_no_transfer_for_each():
    nets = [torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6))) for _ in range(2)]
    for net in nets:
        net.phase = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        for param in net.parameters():
            param.grad = torch.ones_like(param)
    probe, record = Probe(), Backward("backward", [])
    probe.living = [weakref.ref(module) for net in nets for module in net.modules()]
    probe.scatters = True
    with Counted() as counted, warnings.catch_warnings(action="error"):
        scattered.note_left(probe, record)
    each = (6 * (16 + 4)) ** 0.5
    assert record.left == pytest.approx([each, each, each * 2**0.5])
    assert counted.transfers() == 0


def _stepped(optimizer):
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()


def _watching(then, mode="watch"):
    lockstep.audit.start(mode=mode)
    try:
        return then(session._running)
    finally:
        lockstep.audit.stop()


def test_an_optimizer_that_never_steps_does_not_keep_the_watch_awake():
    def train(probe):
        one, idle = (torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1) for _ in "ab")
        awake = []
        for _ in range(FIRST_STEPS_WATCH + 5):
            _backward(one)
            one.step()
            awake.append(probe.detailed)
        for _ in range(3):
            _backward(idle)
            idle.step()
        return awake, [step.number for step in probe.optimizers[idle].track.steps]

    awake, written = _watching(train)
    assert awake[FIRST_STEPS_WATCH - 1 :].count(True) < 4
    assert written == [1, 2], "its first step had begun before anybody looked"


def _backward(optimizer):
    sum(p.sum() for p in optimizer.param_groups[0]["params"]).backward()


def test_without_any_step_only_the_first_backwards_are_looked_at():
    weight = torch.nn.Parameter(torch.ones(3))

    def train(probe):
        for _ in range(backwards._WITHOUT_STEP + 2):
            weight.sum().backward()
        return probe.detailed

    assert not _watching(train)


def _late(body):
    """What ``body(probe, model, step)`` returns when steps are not looked at any more."""

    def train(probe):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        while probe.detailed:
            step()
        probe.ledger.started_group = True  # evaluations of one process are not compared
        return body(probe, model, step)

    return _watching(train, mode="full")


def _evaluate(model):
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 3))


def test_a_late_step_calls_modules_as_torch_does_alone():
    assert _late(lambda *_: len(torch_modules._global_forward_pre_hooks)) == 0


def test_a_late_evaluation_is_written_down_and_costs_no_later_step():
    def body(probe, model, step):
        _evaluate(model)
        model.train()
        step()
        return probe.ledger.evaluations, len(torch_modules._global_forward_pre_hooks)

    (evaluation,), hooks = _late(body)
    assert evaluation.names == ["0.running_mean", "0.running_var"]
    assert hooks == 0


class Asked(torch.nn.Module):
    """Counts how often somebody asks any of them for its mode."""

    questions = 0

    @property
    def training(self):
        Asked.questions += 1
        return vars(self)["mode"]

    @training.setter
    def training(self, mode):
        vars(self)["mode"] = mode


def test_putting_a_large_model_into_evaluation_mode_takes_a_look_at_each_module_and_no_more():
    def body(probe, model, step):
        large = torch.nn.Sequential(*[Asked() for _ in range(200)])
        Asked.questions = 0
        large.eval()
        return Asked.questions, len(torch_modules._global_forward_pre_hooks)

    questions, hooks = _late(body)
    assert hooks == 1
    assert questions <= 3 * 200


def test_what_stays_in_evaluation_mode_is_written_down_when_it_is_called_late():
    def body(probe, model, step):
        teacher = copy.deepcopy(model).eval()
        step()
        with torch.no_grad():
            teacher(torch.ones(2, 3))
        del teacher
        gc.collect()
        step()
        return len(probe.ledger.evaluations), len(torch_modules._global_forward_pre_hooks)

    assert _late(body) == (1, 0)


def test_a_compiled_program_is_not_compiled_once_more_when_the_hook_could_go():
    graphs = []

    def train(probe):
        model = torch.nn.Linear(3, 1)
        compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while probe.detailed:
            compiled(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        compiled(torch.ones(2, 3))

    _watching(train, mode="full")
    assert len(graphs) == 1


@pytest.mark.slow
def test_an_optimizer_for_each_round_is_not_written_down_for_ever():
    def train(probe):
        for number in range(2 * optimizers._TRACKS):
            _stepped(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))
            if number % 50 == 0 or number == 2 * optimizers._TRACKS - 1:
                gc.collect()  # optimizers end in cycles
        return len(probe.ledger.tracks), len(probe.made), len(probe.made_waiting), probe.detailed

    tracks, made, waiting, detailed = _watching(train)
    assert tracks == optimizers._TRACKS
    assert max(made, waiting) <= optimizers._TRACKS + 50
    assert not detailed


def test_later_optimizers_are_described_as_earlier_ones_without_a_search_of_the_process():
    def train(probe):
        for _ in range(described.SEARCHES + 4):
            model = torch.nn.Linear(3, 1)
            _stepped(torch.optim.SGD(model.parameters(), lr=0.1))
        named = [[p.name for p in track.parameters] for track in probe.ledger.tracks]
        return named, any(found() is model for found in probe.living)

    named, was_searched_for = _watching(train)
    assert named[-1] == named[0] == ["weight", "bias"]
    assert not was_searched_for


@pytest.mark.slow
def test_an_optimizer_for_each_parameter_is_described_by_the_models_own_names():
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(described.SEARCHES)])

    def train(probe):
        for param in model.parameters():
            _stepped(torch.optim.SGD([param], lr=0.1))
        return [track.parameters[0].name for track in probe.ledger.tracks]

    assert _watching(train) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("held", "counted"), [((2, 2), [1, 0]), ((1, 2), [1, 1])], ids=["an outer one", "tied weights"]
)
def test_a_clip_belongs_to_optimizers_whose_gradients_nobody_has_used_yet(held, counted):
    def clips(probe):
        params = [torch.nn.Parameter(torch.ones(3)) for _ in "ab"]
        optimizers = [torch.optim.SGD(params[:number], lr=0.1) for number in held]
        sum(param.sum() for param in params).backward()
        torch.nn.utils.clip_grad_norm_(params, 0.1)
        for optimizer in optimizers:
            optimizer.step()
        return [len(probe.optimizers[each].track.steps[-1].clips) for each in optimizers]

    assert _watching(clips) == counted


def test_an_evaluation_without_buffers_is_looked_through_a_few_times_only():
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(60)]).eval()
    probe = Probe()
    looked = []
    model.named_modules = lambda: looked.append(None) or iter(())
    for _ in range(40):
        evaluations.note_evaluation(probe, model)
    assert 0 < len(looked) < 20


def test_a_long_evaluation_is_asked_for_written_buffers_for_a_while_only():
    model = torch.nn.BatchNorm1d(2).eval()
    probe = Probe()
    looked, modules = [], model.named_modules
    model.named_modules = lambda: looked.append(None) or modules()
    for _ in range(1000):
        evaluations.note_evaluation(probe, model)
    assert 0 < len(looked) < 300
    assert len(probe.ledger.evaluations) == 1


def test_buffers_of_inference_mode_count_as_never_written():
    model = torch.nn.BatchNorm1d(2).eval()
    with torch.inference_mode():
        model.running_mean = torch.ones(2)
    probe = Probe()
    for _ in range(4):
        evaluations.note_evaluation(probe, model)
    assert len(probe.ledger.evaluations) == 1
