# SPDX-License-Identifier: Apache-2.0
"""Cases for `fsdp_ranks.py`: what a program does around a model of which no rank holds all layers.

Those in `SAME` train beside one process in float64, and return how far apart the weights are. Those
in `REFUSED` return the error of this rank.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tests.procs.odd_optimizers import ChoosesByIdentity
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import reset
from lockstep.errors import LockstepError
from lockstep.operator.model_copies import places_of_modules
from lockstep.sync.sharded_sync import ShardedSync
from lockstep.worker.state_dict import gather_models
from ranks.programs import X, Y

PARTS = (slice(0, 8), slice(8, 12))


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(x)))


class Net(nn.Module):
    """The bias of the head has a row for one rank alone."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, Y.shape[1])
        self.short = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.head(self.blocks(x)) * self.short


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Pair:
    """One rank of the run in shards, and one process that trains on all rows."""

    make_optimizer = staticmethod(momentum)

    def __init__(self, group, make=Net, *, criterion=None, prepare=lambda model: None, **options):
        self.group = group
        made = []
        for _ in range(2):
            model, loss = reset(make(), 3), None if criterion is None else reset(criterion(), 4)
            prepare(model)
            modules = [model] if loss is None else [model, loss]
            params = [param for module in modules for param in module.parameters()]
            made.append((modules, self.make_optimizer(params)))
        (self.modules, self.optimizer), (self.truths, self.true_optimizer) = made
        self.before = dict(self.modules[0].named_parameters())
        self.sync = ShardedSync(
            self.modules, group, [self.optimizer], **{"shard": [Block], **options}
        )
        self.part = PARTS[group.rank]

    @property
    def model(self) -> Any:
        return self.modules[0]

    def both(self):
        return (self.modules, self.optimizer), (self.truths, self.true_optimizer)

    def loss(self, modules=None, part=None):
        model, *criteria = self.modules if modules is None else modules
        x, y = (X[self.part], Y[self.part]) if part is None else (X[part], Y[part])
        error = ((model(x) - y) ** 2).mean()
        return criteria[0](error) if criteria else error

    def backward(self) -> None:
        self.sync.backward(self.loss(), weight=len(X[self.part]))
        self.loss(self.truths, slice(None)).backward()

    def train(self, num_steps: int = 3) -> None:
        for step in range(num_steps):
            self.sync.begin_step(step)
            for _, optimizer in self.both():
                optimizer.zero_grad()
            self.backward()
            for _, optimizer in self.both():
                optimizer.step()

    def apart(self) -> float:
        pairs = [
            (one.full_tensor(), other)
            for ours, true in zip(self.modules, self.truths, strict=True)
            for one, other in zip(ours.parameters(), true.parameters(), strict=True)
        ]
        return max(float((one - other).detach().abs().max()) for one, other in pairs)


def refused(call) -> str:
    try:
        call()
    except LockstepError as error:
        return str(error)
    return "not refused"


# ------------------------------------------------------------------------------- what is right


class Scaled(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, error):
        return (error * torch.exp(-self.log_scale) + self.log_scale).sum()


def a_criterion_in_which_no_module_is_a_unit(group):
    pair = Pair(group, criterion=Scaled)
    assert pair.sync.units == ("0.blocks.0", "0.blocks.1", "0", "1")
    pair.train()
    return pair.apart()


def modules_added_after_register(group):
    """The model of one process has them, too."""
    pair = Pair(group)
    run: Any = SimpleNamespace(
        whole_models=[Net()],
        whole_places=places_of_modules([pair.model]),
        plain_models=lambda: [pair.model],
        models_given_alone=True,
    )
    pair.model.head.register_module("watch", nn.Identity())
    for model in (pair.model, pair.truths[0]):
        model.blocks.insert(1, nn.Tanh())
        model.head = nn.Sequential(model.head, nn.Hardtanh(-0.5, 0.5))
    pair.train()
    found = gather_models(run, keep=True)
    assert isinstance(found, Net)
    assert isinstance(found.head[0].watch, nn.Identity)
    with torch.no_grad():
        apart = (found.double()(X) - pair.truths[0](X)).abs().max()
    return max(float(apart), pair.apart())


class KeepsLists(Net):
    """Of parameters; a copy has its own ones in it."""

    def __init__(self):
        super().__init__()
        self.listed = [*self.blocks.parameters()]


def lists_that_nobody_computes_with(group):
    pair = Pair(
        group,
        KeepsLists,
        prepare=lambda model: setattr(model, "first", model.head.weight.detach()),
    )
    run: Any = SimpleNamespace(
        whole_models=[KeepsLists()],
        whole_places=places_of_modules([pair.model]),
        plain_models=lambda: [pair.model],
        models_given_alone=True,
    )
    for name, old in pair.before.items():
        true = dict(pair.truths[0].named_parameters())[name]
        assert {old: name}[old] == name
        assert (old.shape, old.dtype, old.device) == (true.shape, true.dtype, true.device)
        assert (old.numel(), len(old), old.requires_grad) == (true.numel(), len(true), True)
        assert name in repr(old)
        assert name in f"{old}"
        with torch._C.DisableTorchFunctionSubclass():
            assert old.untyped_storage().nbytes() <= old.element_size()
    assert torch.equal(pair.model.first, pair.truths[0].first)
    pair.train()
    found = gather_models(run, keep=True)
    assert list(map(id, found.listed)) == list(map(id, found.blocks.parameters()))
    return pair.apart()


def evaluated_first(group):
    """In inference mode, before anything is trained."""
    pair = Pair(group)
    with torch.inference_mode():
        evaluated = pair.model(X)
        expected = pair.truths[0](X)
    apart = float((evaluated - expected).abs().max())
    pair.train(2)
    with torch.inference_mode():
        apart = max(apart, float((pair.model(X) - pair.truths[0](X)).abs().max()))
    pair.train(2)
    return max(apart, pair.apart())


class BlockOfDistributions(Block):
    """Into which torch does not look, nor into what holds them."""

    def forward(self, x):
        normal = torch.distributions.Normal(super().forward(x), 1.0)
        return [SimpleNamespace(of={"next": torch.distributions.Independent(normal, 1)})]


class ReturnsDistributions(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(BlockOfDistributions() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)[0].of["next"].mean
        return torch.distributions.Normal(self.head(x) * self.short, 1.0)


class WithDistributions(Pair):
    def loss(self, modules=None, part=None):
        model, part = (modules or self.modules)[0], self.part if part is None else part
        return -model(X[part]).log_prob(Y[part]).mean()


def distributions_returned(group):
    pair = WithDistributions(group, ReturnsDistributions, shard=[BlockOfDistributions])
    pair.train()
    return pair.apart()


def largest_numbers(group):
    """Of gradients and weights of which a rank has no rows."""
    pair = Pair(group)
    apart = 0.0
    for step in range(3):
        pair.sync.begin_step(step)
        for _, optimizer in pair.both():
            optimizer.zero_grad()
        pair.backward()
        read = []
        for modules, _ in pair.both():
            held = list(modules[0].parameters())
            clipped = nn.utils.clip_grad_norm_(held, 0.01, norm_type=float("inf"))
            each = [clipped, *(p.grad.abs().max() for p in held), *(p.min() for p in held)]
            each += [torch.linalg.vector_norm(p.grad, float("-inf")) for p in held]
            each += [p.grad.norm(float("inf")) for p in held]
            each += [p.grad.amax() for p in held] + [p.grad.norm(2) for p in held]
            read.append([number.item() for number in each])
        apart = max(apart, *(abs(one - other) for one, other in zip(*read, strict=True)))
        for _, optimizer in pair.both():
            optimizer.step()
    return max(apart, pair.apart())


def a_unit_unfrozen_under_mp_policy(group):
    """Gradients are summed in float32, and weights stay float64, as with units never frozen."""

    def train(*, is_frozen):
        policy = MixedPrecisionPolicy(torch.float32, torch.float64)
        pair = Pair(
            group,
            mp_policy=policy,
            prepare=lambda model: model.blocks[1].requires_grad_(not is_frozen),
        )
        for modules, _ in pair.both():
            modules[0].blocks[1].requires_grad_(True)
        pair.train()
        assert all(param.grad.dtype is torch.float64 for param in pair.model.parameters())
        found = [param.full_tensor().detach() for param in pair.model.parameters()]
        pair.sync.detach()
        return found

    pairs = zip(train(is_frozen=True), train(is_frozen=False), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def backwards_with_inputs(group):
    """For all weights, for those of one block, and for those of no block; with a weight, too."""
    pair = Pair(group)
    chosen = (
        lambda model: list(model.parameters()),
        lambda model: list(model.blocks[1].parameters()),
        lambda model: [model.short, model.head.bias],
        lambda model: model.blocks[0].wide.weight,
    )
    for step, choose in enumerate(chosen * 2):
        pair.sync.begin_step(step)
        for _, optimizer in pair.both():
            optimizer.zero_grad()
        if step < len(chosen):
            pair.sync.set_delivered_weight(len(X[pair.part]))
            pair.loss().backward(inputs=choose(pair.model))
        else:
            pair.sync.backward(pair.loss(), weight=len(X[pair.part]), inputs=choose(pair.model))
        pair.loss(pair.truths, slice(None)).backward(inputs=choose(pair.truths[0]))
        pairs = zip(pair.model.parameters(), pair.truths[0].parameters(), strict=True)
        assert all((one.grad is None) == (other.grad is None) for one, other in pairs)
        for _, optimizer in pair.both():
            optimizer.step()
    return pair.apart()


class WithChoices(Pair):
    make_optimizer = staticmethod(ChoosesByIdentity)


def an_optimizer_that_chooses_by_identity(group):
    pair = WithChoices(group)
    pair.train()
    return pair.apart()


SAME = [
    a_criterion_in_which_no_module_is_a_unit,
    modules_added_after_register,
    lists_that_nobody_computes_with,
    evaluated_first,
    distributions_returned,
    largest_numbers,
    backwards_with_inputs,
    an_optimizer_that_chooses_by_identity,
    a_unit_unfrozen_under_mp_policy,
]

# ----------------------------------------------------------------------------- what is refused


def clipped_by_a_list_of_before(group):
    pair = Pair(group)
    pair.backward()
    return refused(lambda: nn.utils.clip_grad_norm_(pair.before.values(), 0.1))


def stepped_by_an_optimizer_of_before(group):
    pair = Pair(group, prepare=lambda model: setattr(model, "kept", [model.head.weight]))
    pair.backward()
    return refused(torch.optim.SGD(pair.model.kept, lr=0.1).step)


class MultipliesByAList(Net):
    def __init__(self):
        super().__init__()
        self.listed = [self.head.weight]

    def forward(self, x):
        return x @ self.listed[0].T


def computed_with_a_list_of_before(group):
    pair = Pair(group, MultipliesByAList)
    return refused(lambda: pair.model(X))


def tied_after_register(group):
    pair = Pair(group)
    pair.train(1)
    pair.model.blocks[1].wide.weight = pair.model.blocks[0].wide.weight
    return refused(pair.train)


def replaced_after_register(group):
    pair = Pair(group)
    pair.train(1)
    pair.model.head.weight = nn.Parameter(pair.model.head.weight.detach() * 2)
    return refused(pair.train)


def replaced_before_backward(group):
    pair = Pair(group)
    pair.train(1)
    loss = pair.loss()
    pair.model.blocks[0].wide.bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    return refused(lambda: pair.sync.backward(loss, weight=1))


def zeroed_in_a_window_on_one_rank(group):
    pair = Pair(group)
    pair.train(1)

    def window():
        pair.optimizer.zero_grad()
        with pair.sync.no_sync():
            pair.sync.backward(pair.loss(), weight=1)
        if group.rank == 1:
            pair.optimizer.zero_grad()
        pair.sync.backward(pair.loss(), weight=1)
        pair.optimizer.step()

    before = [param.to_local().clone() for param in pair.model.parameters()]
    text = refused(window)
    now = [param.to_local() for param in pair.model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
    pair.train()
    assert pair.apart() < 1e-12
    return text


def data_of_a_gradient_assigned(group):
    pair = Pair(group)
    pair.backward()
    grad = pair.model.head.weight.grad
    grad.data = grad.data * 0.5
    return refused(pair.optimizer.step)


def data_of_a_gradient_assigned_before_a_backward(group):
    pair = Pair(group)
    pair.backward()
    grad = pair.model.head.weight.grad
    grad.data = grad.data * 0.5
    return refused(pair.backward)


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))


def channels_last(group):
    return refused(
        lambda: Pair(
            group,
            Image,
            prepare=lambda model: model.to(memory_format=torch.channels_last),
            shard=[nn.Conv2d],
        )
    )


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=True)
        self.blocks = nn.Sequential(Block(), Block())


def a_sparse_embedding(group):
    return refused(lambda: Pair(group, Words))


def gradients_of_weights_asked_for(group):
    pair = Pair(group)
    pair.train(1)
    weights = list(pair.model.parameters())
    texts = {refused(lambda: torch.autograd.grad(pair.loss(), weights))}
    texts.add(refused(lambda: torch.autograd.grad(pair.loss(), weights, allow_unused=True)))
    pair.train()
    assert pair.apart() < 1e-12
    (text,) = texts
    return text


REFUSED = {
    clipped_by_a_list_of_before: ("LS102", "`short`"),
    stepped_by_an_optimizer_of_before: ("LS102", "`grad` of it"),
    computed_with_a_list_of_before: ("LS102", "list(self.model.parameters())"),
    tied_after_register: ("LS102", "`blocks.1.wide.weight`"),
    replaced_after_register: ("LS102", "`head.weight`"),
    replaced_before_backward: ("LS102", "`blocks.0.wide.bias`"),
    zeroed_in_a_window_on_one_rank: ("LS101", "2, 1"),
    data_of_a_gradient_assigned: ("LS003", "p.grad.copy_"),
    data_of_a_gradient_assigned_before_a_backward: ("LS003", "p.grad.copy_"),
    gradients_of_weights_asked_for: ("LS003", "loss.backward()"),
    channels_last: ("LS003", "channels_last"),
    a_sparse_embedding: ("LS103", "`words.weight`"),
}

CASES = [*SAME, *REFUSED]
