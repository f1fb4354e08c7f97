# SPDX-License-Identifier: Apache-2.0
"""Judges a round by the sums of the ranks' contributions: may its gradients be used?

Where one rank has to refuse, every rank raises, with the same words. A rank that raised alone
would leave its peers waiting. So the rank contributes zeros and a count, and when all ranks have
seen the count, they exchange the faults that it counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from lockstep.errors import (
    GradientNotReducedError,
    LockstepError,
    MixedWeightsError,
    NotAvailableError,
    SparseGradientError,
    UnknownParameterError,
    WeightError,
    WrongUseError,
)

if TYPE_CHECKING:
    from lockstep.group import Group
    from lockstep.sync.round_contribution import Contribution, Fault, RoundTotals


def is_out_of_step(sums: RoundTotals, mine: Contribution, group: Group) -> bool:
    """Whether the ranks reduced different rounds together; all ranks find the same answer."""
    expected = mine.check * group.size, mine.check_squared * group.size
    return (sums.check, sums.check_squared) != expected


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
        raise GradientNotReducedError(
            "the ranks reduced different rounds together",
            where=place,
            expected="every rank in the same round of the same step",
            got=f"round {mine.check} here, {sums.check / group.size} on average",
            cause="one rank ran more backwards than another, left a step out, or used models"
            " in another order",
            fix="run the same backwards on every rank in every step; hand all models of a"
            " backward to one replicate([...]); a rank with nothing to run calls reduce_pending()",
        )
    if sums.faults:
        if together:
            _refuse_together(group, mine.faults)
        _refuse_alone(place, mine.faults)
    if 0 < sums.delivered < sums.plain:
        got = f"{sums.delivered:.0f} ranks know the weight of their batch, others do not"
        raise fault_error("weights_known_on_some_ranks", got, where=place)
    if sums.earlier != mine.earlier * group.size:
        raise fault_error("by_hand", where=place)
    if sums.plain and sums.weighted:
        got = f"{sums.plain:.0f} ranks plain, {sums.weighted:.0f} ranks weighted"
        raise fault_error("mixed", got, where=place)
    if sums.plain + sums.weighted and not sums.weight > 0.0:
        raise WeightError(
            "the weights of all ranks add up to zero",
            where=place,
            got=f"{sums.weight}",
            fix="skip a step for which no rank has a sample",
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
    raise fault_error(*everyone[ranks[0]][0], where=where)


def _refuse_alone(place: str, mine: list[Fault]) -> None:
    """Raise without an exchange, where the ranks do not read the count at the same time.

    Raises:
        SparseGradientError, MixedWeightsError, GradientNotReducedError: this rank's, if any.
    """
    if mine:
        raise fault_error(*mine[0], where=place)
    raise GradientNotReducedError(
        "another rank refused the last reduction",
        where=place,
        fix="look for the first failure among the other ranks",
    )


class _FaultKind(NamedTuple):
    """What the error for one kind of `Fault` says."""

    what: str
    cause: str
    fix: str
    error: type[LockstepError] = GradientNotReducedError


def _mixed_weights(cause: str) -> _FaultKind:
    return _FaultKind(
        "weighted and plain backwards in one accumulation window",
        cause,
        "use gradients.backward(loss, weight=...) for every backward of the window;"
        " in an operator self.backward(loss)",
        MixedWeightsError,
    )


_FAULTS: Final = {
    "graph": _FaultKind(
        "backward(create_graph=True) through synchronised parameters",
        "a penalty on parameter.grad would differentiate this rank's gradient and not the global"
        " one: what is reduced has no graph",
        "put the penalty into the loss, with torch.autograd.grad(loss, inputs,"
        " create_graph=True), and run one backward; what is this rank's own belongs into"
        " no_sync()",
    ),
    "by_hand": _FaultKind(
        "a backward would add to gradients that are not the same on all ranks",
        "they were assigned or changed by hand (after autograd.grad?), or an earlier backward"
        " failed midway",
        "optimizer.zero_grad() before the backward; or add up the losses",
    ),
    "edited_in_window": _FaultKind(
        "gradients were changed between the backwards of one accumulation window",
        "clipped, scaled or assigned under no_sync(): this rank's part alone, of which nobody"
        " knows afterwards what it counts for",
        "change gradients after the window's last backward, which reduces them",
    ),
    "unfinished": _FaultKind(
        "a backward left parameters without a gradient, and torch's DDP waits for them",
        "a conditional branch, an unused layer, or one loss of several",
        'self.register(..., ddp_args={"find_unused_parameters": True}), and one backward through'
        " the sum of the losses",
    ),
    "waiting": _FaultKind(
        "hooks wait for a global gradient that this backward does not bring",
        "it did not come out of the forward of the model that register() returned, or a second"
        " backward followed one forward",
        "call the model that register() returned; one backward for each forward; or leave out"
        ' sync="ddp"',
    ),
    "weighted_by_other_sync": _FaultKind(
        "a backward with a weight reaches parameters of another GradientSync",
        "two replicate() calls, one loss, and the backward(loss, weight=...) of one of them: the"
        " other does not know what the loss counts for",
        "hand all models of a backward to one replicate([...])",
    ),
    "unknown": _FaultKind(
        "the model holds parameters that nobody synchronises",
        "they were added or replaced after replicate() or register(), and have got a"
        " gradient of this rank alone",
        "build the model first; or detach(), and replicate() again on every rank; or mark"
        " what is each rank's own: lockstep.local(parameter)",
        UnknownParameterError,
    ),
    "sparse": _FaultKind(
        "a sparse gradient cannot travel in a flat bucket",
        "nn.Embedding(sparse=True) or a sparse tensor in the graph",
        "use sparse=False, or mark the parameter: lockstep.local(parameter)",
        SparseGradientError,
    ),
    "moved": _FaultKind(
        "parameters are of another shape, dtype or device than when they were synchronised",
        "model.to(...), model.double() or parameter.data = ... after replicate() or register()",
        "convert the model first; or detach(), and replicate() again on every rank",
    ),
    "late": _FaultKind(
        "a gradient arrived after its bucket had left",
        "reentrant checkpointing runs backward through this parameter more than once, "
        "and did not in the first step",
        "use torch.utils.checkpoint(..., use_reentrant=False)",
    ),
    "mixed": _mixed_weights(
        "loss.backward() and gradients.backward(loss, weight=...) were both used"
    ),
    "weights_known_on_some_ranks": _mixed_weights(
        "some ranks ran another backward than the others"
    ),
    "changed": _mixed_weights(
        "loss.backward() adds up batches of different sizes (is one the last of an epoch?) as if"
        " each counted the same"
    ),
    "empty_batch_in_window": _mixed_weights(
        "one batch of the window holds no samples, and what loss.backward() added for it cannot"
        " be told from the others"
    ),
}


def fault_error(kind: str, got: str = "", *, where: str) -> LockstepError:
    """The error for a `Fault` of `kind`."""
    what, cause, fix, error = _FAULTS[kind]
    return error(what, where=where, got=got or None, cause=cause, fix=fix)


def detached_error(where: str) -> NotAvailableError:
    return NotAvailableError(
        "this GradientSync was detached",
        where=where,
        fix="lockstep.replicate(model) makes a new one",
    )


def broken_error(where: str) -> GradientNotReducedError:
    return GradientNotReducedError(
        "an earlier backward failed after part of its gradients had been sent",
        where=where,
        cause="an exception inside backward was caught and training went on",
        fix="detach(), form a new group, and replicate() again on every rank",
    )


def out_of_order_error(where: str) -> WrongUseError:
    return WrongUseError(
        "a backward of its own, where the shards are added up in a fixed order",
        where=where,
        cause="reproducible=True, and backward was called inside compute_loss",
        fix="return the loss from compute_loss; the default loop runs backward",
    )


def judge_losses(losses: list[float], where: str) -> None:
    """Raise on every rank if the ranks' losses are not one."""
    # As strings: a NaN is not equal to a NaN, and the difference of two infinities is NaN.
    if len(set(map(str, losses))) == 1:
        return
    if max(losses) - min(losses) <= 1e-6 * max(map(abs, losses)):
        return
    raise GradientNotReducedError(
        "LBFGS follows the loss that its closure returns, and every rank returned its own",
        where=where,
        expected="the global loss, the same on every rank",
        got=", ".join(f"{loss:.6g} on rank {rank}" for rank, loss in enumerate(losses)),
        fix="return the mean of the ranks' losses from the closure (torch.distributed.all_reduce)",
    )
