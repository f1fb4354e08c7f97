# SPDX-License-Identifier: Apache-2.0
"""`info_nce` and `nt_xent`: what is refused or warned of, beside what `gather` refuses as well."""

import re

import pytest
import torch
from torch import nn

import lockstep
from harness import assert_same, gradients, reset, rows, run_ranks
from lockstep.errors import ConfigurationError, CrossedWeightsError
from lockstep.sync import replicate
from ranks.test_gather_refused import leaf, refused_everywhere


def negatives_alone(group, replicas, weight, *, trains_b=True):
    """Gradients, of a model that gets rows of `b` alone on rank 1."""
    model, sync = replicas[group.rank], replicate(replicas[group.rank], group=group)
    a, b = (rows(4, 3, seed=2 * seed + group.rank) for seed in range(2))
    a = a if group.rank == 0 else a[:0]
    try:
        b = model(b) if trains_b else b
        own = torch.arange(len(a))
        loss = lockstep.info_nce(model(a), b, 1.0, positives=own, group=group)
        sync.backward(loss, weight=weight[group.rank])
    finally:
        sync.detach()
    return gradients(model)


def test_a_rank_of_negatives_alone_cannot_be_left_out_either():
    replicas = [reset(nn.Linear(3, 3), seed=1) for _ in range(2)]
    message = refused_everywhere(
        2, lambda group: negatives_alone(group, replicas, [4, 0]), CrossedWeightsError, "dropped"
    )
    assert "rank 1 of 2" in message
    assert "weight=len(b)" in message


@pytest.mark.parametrize(("weight", "trains_b"), [([4, 4], True), ([4, 1], True), ([4, 0], False)])
def test_negatives_alone_are_right_with_a_weight_or_without_a_gradient(weight, trains_b):
    true = reset(nn.Linear(3, 3), seed=1)
    b = torch.cat([rows(4, 3, seed=2), rows(4, 3, seed=3)])
    similar = true(rows(4, 3, seed=0)) @ (true(b) if trains_b else b).T
    own = torch.arange(4)
    pairs = similar.log_softmax(1)[own, own] + similar.log_softmax(0)[own, own]
    (-pairs.mean() / 2).backward()
    replicas = [reset(nn.Linear(3, 3), seed=1) for _ in range(2)]
    for found in run_ranks(
        2, lambda group: negatives_alone(group, replicas, weight, trains_b=trains_b)
    ):
        assert_same(found, gradients(true))


BY_ROWS = {
    "info_nce": lambda x, group: lockstep.info_nce(x, x * 2, 1.0, reduction="none", group=group),
    "nt_xent": lambda x, group: lockstep.nt_xent(x, x * 2, 1.0, reduction="none", group=group),
}
by_rows = pytest.mark.parametrize("function", BY_ROWS.values(), ids=BY_ROWS)


def backward_by_rows(function, sizes, loss_of):
    def body(group):
        x = rows(sizes[group.rank], 3, seed=group.rank).requires_grad_()
        loss_of(function(x, group), group).backward()

    run_ranks(len(sizes), body)


@by_rows
@pytest.mark.parametrize("sizes", [[4, 2], [2, 4, 2], [4, 0]])
def test_means_over_the_losses_of_unequal_numbers_of_rows_are_warned_of(function, sizes):
    expected = re.escape(str(sizes)) + (".*rank 1 has none" if 0 in sizes else ".*weight=len")
    with pytest.warns(UserWarning, match=rf"\[LS212\].*{expected}"):
        backward_by_rows(function, sizes, lambda losses, group: losses.sum() / max(1, len(losses)))


@by_rows
@pytest.mark.parametrize(
    ("sizes", "loss_of"),
    [
        ([4, 4], lambda losses, group: losses.mean()),
        ([4, 2], lambda losses, group: lockstep.global_mean(losses, group=group)),
        ([4, 2], lambda losses, group: losses.sum() * 2 / 6),
    ],
    ids=["equal", "global mean", "by hand"],
)
def test_losses_that_count_alike_by_row_are_not_warned_of(function, sizes, loss_of):
    backward_by_rows(function, sizes, loss_of)


@by_rows
def test_the_mean_of_no_losses_is_warned_of_too(function):
    with pytest.warns(UserWarning, match="rank 0 has none"):
        backward_by_rows(function, [0, 4], lambda losses, group: losses.mean())


@pytest.mark.parametrize("function", ["info_nce", "nt_xent"])
@pytest.mark.parametrize(
    ("tiles", "match"),
    [
        ([(4, 5), (3, 5)], "rank 1 against rank 0"),
        ([(4, 5), (4, 0)], "rank 1 against rank 0"),
        ([(4, 0), (4, 0)], r"no tile=\(4, 0\)"),
        ([(-1, 5), (-1, 5)], r"no tile=\(-1, 5\)"),
    ],
)
def test_tiles_that_differ_or_hold_nothing(function, tiles, match):
    """Parts of the gradient travel by the tile: with different ones gloo ends the process."""

    def body(group):
        x = leaf(4, 3)
        getattr(lockstep, function)(x, x * 2, 1.0, tile=tiles[group.rank], group=group)

    refused_everywhere(2, body, ConfigurationError, match)
