# SPDX-License-Identifier: Apache-2.0
"""Judges a round by the sums of the ranks' contributions: may its gradients be used?

Where one rank has to refuse, every rank raises, with the same words. A rank that raised alone
would leave its peers waiting. So the rank contributes zeros and a count, and when all ranks have
seen the count, they exchange the faults that it counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.errors import (
    GradientNotReducedError,
    WeightError,
)
from lockstep.sync import round_error_texts

if TYPE_CHECKING:
    from lockstep.group import Group
    from lockstep.sync.round_contribution import Contribution, Fault, RoundTotals


def is_out_of_step(sums: RoundTotals, mine: Contribution, group: Group) -> bool:
    """Whether the ranks reduced different rounds together; all ranks find the same answer."""
    expected = mine.check * group.size, mine.check_squared * group.size, mine.digest * group.size
    return (sums.check, sums.check_squared, sums.digest) != expected


def judge(sums: RoundTotals, mine: Contribution, group: Group, *, together: bool) -> None:
    """Raise if the gradients of this round must not be used.

    Args:
        sums: of the round.
        mine: this rank's contribution to them.
        group: the ranks.
        together: all ranks read the sums of this round now, so that they can exchange.

    Collective:
        With faults, and `together`: two all-gathers on every rank.

    Raises:
        GradientNotReducedError: the ranks are out of step.
        MixedWeightsError: some ranks brought weighted gradients, others plain ones.
        SparseGradientError: and others, by the kind of fault.
        WeightError: the weights add up to zero.
    """
    place = group.place
    if is_out_of_step(sums, mine, group):
        raise _out_of_step_error(sums, mine, group)
    if sums.faults:
        if together:
            _refuse_together(group, mine.faults)
        _refuse_alone(place, mine.faults)
    if 0 < sums.delivered < sums.plain:
        got = f"{sums.delivered:.0f} ranks know the weight of their batch, others do not"
        raise round_error_texts.fault_error("weights_known_on_some_ranks", got, where=place)
    if sums.earlier != mine.earlier * group.size:
        raise round_error_texts.fault_error("by_hand", where=place)
    if sums.plain and sums.weighted:
        got = f"{sums.plain:.0f} ranks plain, {sums.weighted:.0f} ranks weighted"
        raise round_error_texts.fault_error("mixed", got, where=place)
    if sums.plain + sums.weighted and not sums.weight > 0.0:
        raise WeightError(
            "the weights of all ranks add up to zero",
            where=place,
            got=f"{sums.weight}",
            cause="no rank has a sample in this step. With add_dist_sampler=False: a `__len__` that"
            " says more than a worker's own loader holds (the total over the workers, say)",
            fix="skip a step for which no rank has a sample; let `__len__` say this worker's own",
        )


def _out_of_step_error(
    sums: RoundTotals, mine: Contribution, group: Group
) -> GradientNotReducedError:
    got = f"round {mine.check} here, {sums.check / group.size} on average"
    cause = (
        "one rank ran more backwards than another, left a step out, stepped another optimizer, or"
        " used models in another order"
    )
    fix = (
        "run the same backwards and steps on every rank; hand all models of a backward to one"
        " replicate([...]); a rank with nothing to run calls reduce_pending()"
    )
    if sums.digest != mine.digest * group.size and sums.check == mine.check * group.size:
        got = (
            "that round of another replicate(), a first round with other weights, other weights"
            " after a change that torch.autograd.grad may have had a part in, other values in"
            " buffers that ranks have registered since the last round, or gradients that had left"
            " before a collective"
        )
        cause = (
            "some ranks used models in another order; or weights were changed on some ranks after"
            " replicate() (loaded on rank 0? moved by a rank's own gradient, as in m-SAM?); or"
            " buffers that nobody makes equal, as they came after replicate() (pruning,"
            " spectral_norm, a first forward), were computed from each rank's own rows or random"
            " numbers; or a collective inside the backward"
            " (torch.distributed.nn, SyncBatchNorm) that earlier backwards did not have, beside a"
            " branch that some ranks left out"
        )
        fix = (
            "run the backwards of all models in one order on every rank, or hand the models to one"
            " replicate([...]); load weights and register buffers before replicate(), which sends"
            " rank 0's to all; replicate(model, bucket_cap_mb=1e6) sends no gradient before the"
            " backward has ended"
        )
    return GradientNotReducedError(
        "the ranks reduced different rounds together",
        where=group.place,
        expected="every rank in the same round of the same step",
        got=got,
        cause=cause,
        fix=fix,
    )


def _refuse_together(group: Group, mine: list[Fault]) -> None:
    """Exchange the faults and raise the first one, by rank.

    Collective:
        Every rank of the round, because every rank has read the same count. Two all-gathers.

    Raises:
        SparseGradientError, MixedWeightsError, GradientNotReducedError: by the kind of fault.
    """
    everyone = group.exchange(mine)
    ranks = [rank for rank, faults in enumerate(everyone) if faults]
    where = f"rank {', '.join(map(str, ranks))} of {group.size}"
    raise round_error_texts.fault_error(*everyone[ranks[0]][0], where=where)


def _refuse_alone(place: str, mine: list[Fault]) -> None:
    """Raise without an exchange, where the ranks do not read the count at the same time.

    Raises:
        SparseGradientError, MixedWeightsError, GradientNotReducedError: this rank's, if any.
    """
    if mine:
        raise round_error_texts.fault_error(*mine[0], where=place)
    raise GradientNotReducedError(
        "another rank refused the last reduction",
        where=place,
        fix="look for the first failure among the other ranks",
    )
