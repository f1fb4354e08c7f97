# SPDX-License-Identifier: Apache-2.0
"""Two towers, a temperature and a head, and losses over all rows: alone, and on ranks.

Every loss is written twice. `alone` is plain torch over all rows in one process, the oracle;
`on_ranks` is what a rank computes from its own rows.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional

import lockstep
from harness import cut, generator, gradients, reset, rows, run_ranks
from lockstep.sync import ParameterServerSync, replicate
from ranks.served import server

TOTAL = 24
SPLITS = {
    "2 even": [12, 12],
    "2 uneven": [16, 8],
    "2, one empty": [24, 0],
    "4 even": [6, 6, 6, 6],
    "4 uneven": [9, 6, 6, 3],
    "4, one empty": [10, 0, 8, 6],
}
LEFT, RIGHT = rows(TOTAL, 5, seed=11) + 0.3, rows(TOTAL, 4, seed=12) * 1.7


class Towers(nn.Module):
    """Two encoders, and what the loss holds of its own: a temperature and class weights."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6))
        self.right = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 6))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(6, 3)

    def forward(self, left, right):
        normalize = functional.normalize
        return normalize(self.left(left), dim=1), normalize(self.right(right), dim=1)

    @property
    def scale(self):
        return self.log_scale.exp() * 3


def towers():
    return reset(Towers(), seed=13)


def clip_rows(mine, everyone, scale, labels):
    """-log softmax of each of one's own rows at its label."""
    return functional.cross_entropy(scale * mine @ everyone.T, labels, reduction="none")


def clip(a, b, scale):
    labels = torch.arange(len(a))
    return (clip_rows(a, b, scale, labels) + clip_rows(b, a, scale, labels)).mean() / 2


def simclr(a, b, scale):
    views = torch.cat([a, b])
    similar = (scale * views @ views.T).masked_fill(torch.eye(len(views), dtype=bool), -torch.inf)
    return functional.cross_entropy(similar, torch.arange(len(views)).roll(len(a)))


def proxies(model, a, b):
    """A loss with weights of its own, after the rows of all ranks are there."""
    classes = torch.arange(TOTAL) % 3
    return functional.cross_entropy(model.head(a * b), classes) + clip(a, b, model.scale)


def negatives(rank, size):
    """Pairs that rank `rank` leaves out: other ones on every rank."""
    drawn = torch.rand(TOTAL, TOTAL, generator=generator(17, rank)) < 0.4
    drawn.fill_diagonal_(False)
    return drawn if size > 1 else torch.zeros_like(drawn)


def masked(a, b, scale, mask):
    similar = (scale * a @ b.T).masked_fill(mask, -torch.inf)
    return functional.cross_entropy(similar, torch.arange(len(a)))


class Loss:
    """One line of the table.

    Attributes:
        any_weights: the loss is the same however ranks are weighed against each other.
    """

    any_weights = True

    def alone(self, model, a, b, sizes):
        return clip(a, b, model.scale)


class Full(Loss):
    """The whole loss on every rank."""

    def __init__(self, **arguments):
        self.arguments = arguments

    def on_ranks(self, model, a, b, group):
        a, b = (lockstep.gather(x, group=group, **self.arguments) for x in (a, b))
        return clip(a, b, model.scale)


class WithWeights(Full):
    """A loss with a head of its own."""

    def alone(self, model, a, b, sizes):
        return proxies(model, a, b)

    def on_ranks(self, model, a, b, group):
        a, b = (lockstep.gather(x, group=group, **self.arguments) for x in (a, b))
        return proxies(model, a, b)


class OwnRows(Loss):
    """The mean over a rank's own rows: right if it counts by its rows, or all have as many."""

    any_weights = False

    def of_rows(self, model, a, b, group):
        mine = lockstep.rank_slice(a, group=group)
        labels = torch.arange(mine.start, mine.stop)
        to_b = clip_rows(a, lockstep.gather(b, group=group), model.scale, labels)
        return (to_b + clip_rows(b, lockstep.gather(a, group=group), model.scale, labels)) / 2

    def on_ranks(self, model, a, b, group):
        return self.of_rows(model, a, b, group).mean()


class GlobalMean(OwnRows):
    """The same rows, through `global_mean`: right with any weights."""

    any_weights = True

    def on_ranks(self, model, a, b, group):
        return lockstep.global_mean(self.of_rows(model, a, b, group), group=group)


class OwnNegatives(Loss):
    """Every rank has a loss of its own over all rows; the objective is their mean."""

    any_weights = False

    def alone(self, model, a, b, sizes):
        weights = torch.tensor(sizes, dtype=torch.float64)
        losses = [
            masked(a, b, model.scale, negatives(rank, len(sizes))) for rank in range(len(sizes))
        ]
        return (torch.stack(losses) * weights).sum() / weights.sum()

    def on_ranks(self, model, a, b, group):
        a, b = (lockstep.gather(x, group=group) for x in (a, b))
        return masked(a, b, model.scale, negatives(group.rank, group.size))


class InfoNCE(Loss):
    def __init__(self, tile=(512, 1024)):
        self.tile = tile

    def on_ranks(self, model, a, b, group):
        return lockstep.info_nce(a, b, model.scale, tile=self.tile, group=group)


class InfoNCEByRows(OwnRows):
    """Its losses of rows, averaged by hand."""

    def on_ranks(self, model, a, b, group):
        return lockstep.info_nce(a, b, model.scale, reduction="none", group=group).mean()


class InfoNCEWithPartners(Loss):
    """Partners at other places, some shared, some rows of `b` nobody's."""

    partners = torch.randint(TOTAL, (TOTAL,), generator=generator(19))

    def alone(self, model, a, b, sizes):
        similar = model.scale * a @ b.T
        by_row = similar.log_softmax(1).gather(1, self.partners[:, None])
        by_column = similar.log_softmax(0).gather(1, self.partners[:, None])
        return -(by_row + by_column).mean() / 2

    def on_ranks(self, model, a, b, group):
        mine = self.partners[lockstep.rank_slice(a, group=group)]
        return lockstep.info_nce(a, b, model.scale, positives=mine, tile=(4, 5), group=group)


class NTXent(Loss):
    def __init__(self, tile=(512, 1024)):
        self.tile = tile

    def alone(self, model, a, b, sizes):
        return simclr(a, b, model.scale)

    def on_ranks(self, model, a, b, group):
        return lockstep.nt_xent(a, b, model.scale, tile=self.tile, group=group)


class NTXentByRows(NTXent):
    any_weights = False

    def on_ranks(self, model, a, b, group):
        return lockstep.nt_xent(a, b, model.scale, reduction="none", group=group).mean()


LOSSES = {
    "full": Full(),
    "full, replicated": Full(backward="replicated"),
    "weights": WithWeights(),
    "weights, replicated": WithWeights(backward="replicated"),
    "own rows": OwnRows(),
    "global mean": GlobalMean(),
    "own negatives": OwnNegatives(),
    "info_nce": InfoNCE(),
    "info_nce, tiles 3 x 5": InfoNCE(tile=(3, 5)),
    "info_nce by rows": InfoNCEByRows(),
    "info_nce, partners": InfoNCEWithPartners(),
    "nt_xent": NTXent(),
    "nt_xent, tiles 3 x 5": NTXent(tile=(3, 5)),
    "nt_xent, tiles 1 x 1": NTXent(tile=(1, 1)),
    "nt_xent by rows": NTXentByRows(),
}

SYNCS = {
    "replicate": lambda model, group, *_: replicate(model, group=group, bucket_cap_mb=1e-4),
    "parameter_server": lambda model, group, optimizer, address: ParameterServerSync(
        [model], [optimizer], group, address, bucket_cap_mb=1e-4
    ),
}
"""How gradients become one: from a model, a group, an optimizer and where a server listens, to
what has `backward` and `detach`."""


def one_process(loss, sizes, steps):
    """Gradients of every step of SGD with momentum, and the losses."""
    model = towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen, values = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss.alone(model, *model(LEFT, RIGHT), sizes)
        value.backward()
        seen.append(gradients(model))
        values.append(value.item())
        optimizer.step()
    return seen, values


def on_ranks(loss, sizes, steps, sync, *, weighted):
    """The same on ranks: by rank, gradients and losses of every step."""
    replicas = [towers() for _ in sizes]

    def one_rank(group):
        model = replicas[group.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        attached = SYNCS[sync](model, group, optimizer, address)
        mine = cut(TOTAL, sizes)[group.rank]
        seen, values = [], []
        try:
            for _ in range(steps):
                optimizer.zero_grad()
                value = loss.on_ranks(model, *model(LEFT[mine], RIGHT[mine]), group)
                if weighted:
                    attached.backward(value, weight=sizes[group.rank])
                else:
                    value.backward()
                seen.append(gradients(model))
                values.append(value.item())
                optimizer.step()
        finally:
            attached.detach()
        return seen, values

    with server(len(sizes)) if sync == "parameter_server" else nullcontext() as address:
        return run_ranks(len(sizes), one_rank)
