# SPDX-License-Identifier: Apache-2.0
"""`average_gradients`: averages the gradients of a model once, without a `GradientSync`."""

from __future__ import annotations

from typing import Any

from lockstep.group import resolve_group
from lockstep.sync import optimizer_guard
from lockstep.sync.buckets import Slot
from lockstep.sync.reducer import Reducer
from lockstep.sync.replica_checks import compare_structures
from lockstep.sync.round_checks import judge
from lockstep.sync.round_contribution import PLAIN, Contribution
from lockstep.sync.synced_tensors import as_modules, find_synced_tensors
from lockstep.sync.weighted_loss_scale import as_weight

_CAP_BYTES = 25 * 2**20


def average_gradients(model: Any, weight: float | None = None, *, group: Any = None) -> None:
    """Replace every gradient by its weighted mean over the ranks. Call it once, after backward.

    Args:
        model: a module or a sequence of modules without a `GradientSync`.
        weight: what this rank's gradients count for (samples, tokens); None: one per rank.
            Zero: takes part without contributing, even a gradient that is NaN.
        group: a `Group`, a process group, or None for the world group.

    Gradient:
        sum over ranks of weight * gradient / sum of weights, over all ranks: a rank without a
        gradient where others have one counts as zero and receives it; where no rank has one,
        it stays None.

    Collective:
        Every rank, the same calls whatever each one's gradients are: three small all-gathers
        and one all-reduce per bucket of 25 MiB. Blocks.

    Raises:
        ConfigurationError: a GradientSync is attached already.
        ReplicasDifferError: the ranks' models differ; raised before gradients move.
        SparseGradientError: on every rank, if any rank has one.
        WeightError: a bad weight, or weights that add up to zero.
        PeerLostError: another rank went away.
    """
    ranks = resolve_group(group)
    share = 1.0 if weight is None else as_weight(weight, ranks.place)
    found = find_synced_tensors(as_modules(model))
    optimizer_guard.refuse_attached(found.parameters, "leave average_gradients out")
    compare_structures(ranks, found, {})
    slots = [
        Slot(number, name, param) for number, (name, param) in enumerate(found.parameters.items())
    ]
    # An optimizer also steps with the gradient of a parameter that was frozen since.
    held = [slot for slot in slots if slot.param.requires_grad or slot.param.grad is not None]
    of_ranks = ranks.exchange((share, [slot.number for slot in held]))
    # In units of the mean weight: 60 000 tokens times a gradient would overflow float16.
    share /= sum(one / ranks.size for one, _ in of_ranks) or 1.0  # all zero: refused in the round
    numbers = set().union(*(theirs for _, theirs in of_ranks))
    reducer = Reducer([slot for slot in slots if slot.number in numbers], ranks, _CAP_BYTES)
    contribution = Contribution(PLAIN, weight=share, scale=share)
    reducer.start(contribution)
    sums = reducer.finish(must_read=True)
    assert sums is not None
    judge(sums, contribution, ranks, together=True)
