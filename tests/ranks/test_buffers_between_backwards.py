# SPDX-License-Identifier: Apache-2.0
"""Rank 0's buffers go over the others' after a round: a graph that still needs them keeps them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

from harness import assert_same, gradients, run_ranks
from kinds import KINDS, NESTED
from lockstep.sync.ddp_sync import DDPSync
from ranks.programs import X, Y
from ranks.test_replicate_exact import weights
from ranks.ways import assert_exact, built, every_way, on_ranks, our_buckets

# Torch says so once in a process, whoever makes such a tensor first.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

PARTS = (slice(0, 6), slice(6, 12))


class Masked(nn.Linear):
    """A constant that the graph saves."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 2.0]))

    def forward(self, x):
        return (super().forward(x) * self.mask).square()


class Viewed(Masked):
    """Two buffers in one memory, the second a part of the first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("part", self.mask[1:])

    def forward(self, x):
        return super().forward(x) + (super().forward(x)[:, :2] * self.part).sum(1, keepdim=True)

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        self.part = self.mask[1:]
        return self


class Constrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = orthogonal(nn.Linear(4, 4), orthogonal_map="householder")
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x))


class Normalised(nn.Sequential):
    """Statistics of each rank's rows."""

    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def losses(model, part):
    return [
        ((model(X[part]) - Y[part]) ** 2).sum(dim=1).mean(),
        model(X[part] * 2).square().mean(),
    ]


def rate(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@our_buckets
@pytest.mark.parametrize("build", [Masked, Viewed, Constrained, Normalised])
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_two_forwards_and_then_their_backwards(way, build, cap_mb):
    def body(rank):
        seen = []
        for _ in range(3):
            rank.optimizer.zero_grad()
            for loss in losses(rank.model, PARTS[rank.number]):
                loss.backward()
            seen.append(gradients(rank.plain))
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    true, seen = built(build), []
    optimizer = rate(true)
    for _ in range(3):
        optimizer.zero_grad()
        for part in PARTS:
            (sum(losses(true, part)) / 2).backward()
        seen.append(gradients(true))
        optimizer.step()
    results = on_ranks(way, body, build=build, make=rate, bucket_cap_mb=cap_mb)
    assert_exact(results, [*seen, weights([true])])


class Players(nn.Module):
    """A maker and a judge, both normalised; one of the maker's outputs serves both."""

    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.judge = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def two_optimizers(model):
    return [rate(model.judge), rate(model.maker)]


def play(model, optimizers, parts, backward, plain=None):
    """Three rounds of the game; `backward(losses)` for the losses of all `parts`.

    `plain` holds the parameters of `model` under their own names, where wrappers rename them.
    """
    plain, seen = plain or model, []
    for_judge, for_maker = optimizers
    for _ in range(3):
        fakes = [model.maker(X[part]) for part in parts]
        for_judge.zero_grad()
        pairs = zip(parts, fakes, strict=True)
        judged = [(model.judge(Y[part]), model.judge(fake.detach())) for part, fake in pairs]
        backward([(real - 1).square().mean() + fake.square().mean() for real, fake in judged])
        seen.append(gradients(plain.judge))
        for_judge.step()
        for_maker.zero_grad()
        backward([(model.judge(fake) - 1).square().mean() for fake in fakes])
        seen.append(gradients(plain.maker))
        for_maker.step()
    return [*seen, weights([plain])]


def played_by_one():
    true = built(Players)
    return play(
        true, two_optimizers(true), PARTS, lambda found: (sum(found) / len(found)).backward()
    )


@our_buckets
def test_an_output_that_two_backwards_need(way):
    def body(rank):
        parts = [PARTS[rank.number]]
        return play(rank.plain, rank.optimizers, parts, lambda found: found[0].backward())

    results = on_ranks(way, body, build=Players, make=two_optimizers)
    assert_exact(results, played_by_one())


def test_an_output_that_two_backwards_need_under_ddp():
    """Each of the two models in a wrapper of its own, as torch's DDP wants them."""

    def one_rank(group):
        model = built(Players)
        sync = DDPSync([model.maker, model.judge], group, ddp_args={})
        maker, judge = sync.models
        wrapped = SimpleNamespace(maker=maker, judge=judge)
        parts = [PARTS[group.rank]]
        try:
            return play(
                wrapped, two_optimizers(model), parts, lambda found: found[0].backward(), model
            )
        finally:
            sync.detach()

    assert_exact(run_ranks(2, one_rank), played_by_one())


class Holding(nn.Module):
    """A buffer of some kind beside a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


ALL = {**KINDS, **NESTED}


def seen_in(tensor):
    """What can be read in it; a jagged tensor has a number of its own besides."""
    return list(map(repr, tensor.unbind())) if tensor.is_nested else repr(tensor)


@every_way
@pytest.mark.parametrize("kind", ALL)
def test_buffers_of_all_kinds_follow_rank_0(way, kind):
    """When a rank attaches, and after each backward."""
    make = ALL[kind]
    numbers = {}

    def before(plain):
        plain.register_buffer("held", make(2.0 + numbers.setdefault(id(plain), len(numbers))))

    def body(rank):
        attached = seen_in(rank.plain.held)
        rank.plain.held = make(4.0 - 2 * rank.number)
        part = PARTS[rank.number]
        rank.sync.backward(((rank.model(X[part]) - Y[part]) ** 2).mean(), weight=6)
        return attached, seen_in(rank.plain.held), gradients(rank.plain)

    true = built(Holding)
    ((true(X) - Y) ** 2).mean().backward()
    for attached, later, found in on_ranks(way, body, build=Holding, before=before):
        assert attached == seen_in(make(2.0))
        assert later == seen_in(make(4.0))
        assert_same(found, gradients(true))


class Remembering(nn.Module):
    """A buffer with a row for each row of the batch, and one that is there from then on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("last", torch.zeros(6, 3))
        self.register_buffer("largest", torch.zeros(1))

    def forward(self, x):
        out = self.layer(x)
        self.last = out.detach()
        self.largest = None if len(x) == 6 else self.last.amax(dim=0).to_sparse()
        return out


class Scaled(nn.Module):
    """The first batch says how its inputs are scaled."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", None)

    def forward(self, x):
        now = x.detach().abs().mean(0)
        self.scale = now if self.scale is None else 0.5 * self.scale + 0.5 * now
        return self.layer(x / self.scale)


@every_way
def test_a_buffer_that_the_first_forward_fills_becomes_rank_0s(way):
    def body(rank):
        seen = []
        for _ in range(2):
            rank.optimizer.zero_grad()
            loss = ((rank.model(X[PARTS[rank.number]]) - Y[PARTS[rank.number]]) ** 2).mean()
            rank.sync.backward(loss, weight=6)
            seen += [gradients(rank.plain), {"scale": rank.plain.scale.clone()}]
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    true, seen, scale = built(Scaled), [], None
    optimizer = rate(true)
    for _ in range(2):
        optimizer.zero_grad()
        scales = []
        for part in PARTS:
            true.scale = scale
            (((true(X[part]) - Y[part]) ** 2).mean() / 2).backward()
            scales.append(true.scale)
        scale = scales[0]
        seen += [gradients(true), {"scale": scale}]
        optimizer.step()
    assert_exact(on_ranks(way, body, build=Scaled, make=rate), [*seen, weights([true])])


@every_way
@pytest.mark.parametrize("rows", [(7, 5), (6, 5), (5, 6)])
def test_a_buffer_as_long_as_a_ranks_rows_becomes_rank_0s(way, rows):
    """Unequal lengths in one broadcast end a process of gloo's."""
    parts = (slice(0, rows[0]), slice(rows[0], sum(rows)))

    def body(rank):
        part, seen = parts[rank.number], []
        for _ in range(2):
            rank.optimizer.zero_grad()
            loss = ((rank.model(X[part]) - Y[part]) ** 2).mean()
            rank.sync.backward(loss, weight=rows[rank.number])
            largest = rank.plain.largest
            kept = None if largest is None else largest.to_dense().clone()
            seen += [gradients(rank.plain), {"last": rank.plain.last.clone(), "largest": kept}]
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    true, seen = built(Remembering), []
    optimizer = rate(true)
    whole = slice(0, sum(rows))
    for _ in range(2):
        optimizer.zero_grad()
        ((true(X[whole]) - Y[whole]) ** 2).mean().backward()
        last = true.last[: rows[0]]
        largest = None if rows[0] == 6 else last.amax(dim=0)
        seen += [gradients(true), {"last": last, "largest": largest}]
        optimizer.step()
    results = on_ranks(way, body, build=Remembering, make=rate)
    assert_exact(results, [*seen, weights([true])])
