# SPDX-License-Identifier: Apache-2.0
"""`average_gradients`: averages the gradients of a model once, without a `GradientSync`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch.utils.weak import WeakIdKeyDictionary

from lockstep.crossed_gradients import have_crossed
from lockstep.errors import ConfigurationError, CrossedWeightsError
from lockstep.group import resolve_group
from lockstep.sync import optimizer_guard
from lockstep.sync.buckets import Slot
from lockstep.sync.reducer import Reducer
from lockstep.sync.replica_checks import compare_structures, compare_values
from lockstep.sync.round_checks import judge
from lockstep.sync.round_contribution import PLAIN, Contribution, digest_of
from lockstep.sync.synced_tensors import as_modules, find_synced_tensors
from lockstep.sync.tensor_bits import sum_of_bits
from lockstep.sync.weighted_loss_scale import as_weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.group import Group

_CAP_BYTES = 25 * 2**20

_compared: Final[Any] = WeakIdKeyDictionary()
"""The parameters whose values the ranks have found equal."""


def average_gradients(model: Any, weight: float | None = None, *, group: Any = None) -> None:
    """Replace every gradient by its weighted mean over the ranks. Call it once, after backward.

    The ranks' models have to be equal: the first call for a model compares its weights.

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
        and one all-reduce per bucket of 25 MiB; two more where weights differ. Blocks.

    Raises:
        ConfigurationError: a GradientSync is attached already, or all parameters are local.
        ReplicasDifferError: the ranks' models differ, in structure or, at the first call, in their
            weights; on every rank, before gradients move.
        SparseGradientError: on every rank, if any rank has one.
        WeightError: a bad weight, or weights that add up to zero.
        CrossedWeightsError: on every rank: unequal weights, for gradients of a plain backward
            through `gather` or a loss over the rows of all ranks.
        PeerLostError: another rank went away.
    """
    ranks = resolve_group(group)
    share = 1.0 if weight is None else as_weight(weight, ranks.place)
    found = find_synced_tensors(as_modules(model))
    if found.local and not found.parameters:
        raise ConfigurationError(
            "average_gradients was given parameters that are each rank's own",
            where=ranks.place,
            cause="all of them are marked with lockstep.local: nothing would be averaged",
            fix="leave out lockstep.local(...), or average_gradients(...)",
        )
    optimizer_guard.refuse_attached(found.parameters, "leave average_gradients out")
    compare_structures(ranks, found, {})
    slots = [
        Slot(number, name, param) for number, (name, param) in enumerate(found.parameters.items())
    ]
    # An optimizer also steps with the gradient of a parameter that was frozen since.
    held = [slot for slot in slots if slot.param.requires_grad or slot.param.grad is not None]
    has_crossed = have_crossed(slot.param for slot in held if slot.param.grad is not None)
    digest = _digest(slots, ranks)
    of_ranks = ranks.exchange((share, [slot.number for slot in held], has_crossed, digest))
    if len({theirs for *_, theirs in of_ranks}) > 1:
        compare_values(ranks, found.parameters, have_stepped=None)
    if digest:
        _compared.update((slot.param, True) for slot in slots)
    shares = [one for one, *_ in of_ranks]
    if any(crossed for *_, crossed, _ in of_ranks) and len(set(shares)) > 1:
        raise _crossed_error(shares, ranks)
    # In units of the mean weight: 60 000 tokens times a gradient would overflow float16.
    share /= sum(one / ranks.size for one in shares) or 1.0  # all zero: refused in the round
    numbers = set().union(*(theirs for _, theirs, *_ in of_ranks))
    reducer = Reducer([slot for slot in slots if slot.number in numbers], ranks, _CAP_BYTES)
    contribution = Contribution(PLAIN, weight=share, scale=share)
    reducer.start(contribution)
    sums = reducer.finish(must_read=True)
    assert sums is not None
    judge(sums, contribution, ranks, together=True)
    optimizer_guard.note_averaged(slot.param for slot in held)


def _digest(slots: Sequence[Slot], ranks: Group) -> int:
    """Of the weights, where the ranks have not found all of them equal before; 0 elsewhere.

    The gradient of a mean over all rows is a mean of gradients at one point.
    """
    if ranks.is_alone or all(slot.param in _compared for slot in slots):
        return 0
    return digest_of(ranks.size, *(sum_of_bits(slot.param) for slot in slots))


def _crossed_error(shares: Sequence[float], ranks: Group) -> CrossedWeightsError:
    listed = ", ".join(f"{share:g} on rank {rank}" for rank, share in enumerate(shares))
    return CrossedWeightsError(
        "gradients have crossed ranks, and unequal weights would be applied to them afterwards",
        where=ranks.place,
        expected="no weight, or equal ones",
        got=listed,
        cause="gather, global_mean, info_nce or nt_xent in a plain loss.backward(), in which every"
        " rank counted alike",
        fix="average_gradients(model) for a loss over the rows of all ranks; for a mean over a"
        " rank's own rows lockstep.replicate(model), and gradients.backward(loss, weight=...)",
    )
