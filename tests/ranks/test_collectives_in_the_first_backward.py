# SPDX-License-Identifier: Apache-2.0
"""Collectives in the first backward, with weights far apart: the ranks' losses are in one unit."""

import pytest
import torch

import lockstep
from harness import assert_same, gradients, run_ranks
from lockstep.sync import replicate
from ranks.programs import X
from ranks.ways import built

PARTS = (slice(0, 8), slice(8, 12))


def _mean_distance(rows, group, **options):
    left, right = (lockstep.gather(each, group=group, **options) for each in (rows, rows.flip(1)))
    return (left.unsqueeze(1) - right).square().mean()


def _replicated(rows, group):
    return _mean_distance(rows, group, backward="replicated")


def _global_mean(rows, group):
    return lockstep.global_mean(rows.square().sum(dim=1), group=group)


def _info_nce(rows, group, **options):
    return lockstep.info_nce(rows, rows.flip(1), 0.5, group=group, **options)


def _info_nce_of_rows(rows, group):
    return _info_nce(rows, group, reduction="none")


def _shifted_info_nce(rows, group):
    places = lockstep.rank_slice(rows, group=group)
    positives = (torch.arange(places.start, places.stop) + 1) % 12
    return _info_nce(rows, group, positives=positives)


def _nt_xent(rows, group, **options):
    return lockstep.nt_xent(rows, rows.flip(1), 0.5, group=group, **options)


def _nt_xent_of_rows(rows, group):
    return _nt_xent(rows, group, reduction="none")


CROSSING = [
    _mean_distance,
    _replicated,
    _global_mean,
    _info_nce,
    _info_nce_of_rows,
    _shifted_info_nce,
    _nt_xent,
    _nt_xent_of_rows,
]


@pytest.mark.parametrize("function", CROSSING)
def test_gradients_that_cross_ranks_in_the_first_backward(function):
    tokens, replicas, true = (3.0, 1100.0), [built() for _ in PARTS], built()

    def whole(group):
        losses = function(true(X), group)
        if losses.ndim:
            by_rank = [
                losses[part].mean() * count for part, count in zip(PARTS, tokens, strict=True)
            ]
            losses = sum(by_rank) / sum(tokens)
        losses.backward()
        return gradients(true)

    def on_rank(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        try:
            loss = function(model(X[PARTS[group.rank]]), group).mean()
            sync.backward(loss, weight=tokens[group.rank])
            return gradients(model)
        finally:
            sync.detach()

    (expected,) = run_ranks(1, whole)
    for found in run_ranks(2, on_rank):
        assert_same(found, expected)
