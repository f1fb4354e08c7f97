# SPDX-License-Identifier: Apache-2.0
"""The errors of a round: for each kind of `Fault` what it says, and what else a sync refuses."""

from __future__ import annotations

from typing import Final, NamedTuple

from lockstep.errors import (
    GradientNotReducedError,
    LockstepError,
    MixedWeightsError,
    NotAvailableError,
    SparseGradientError,
    UnknownParameterError,
    WrongUseError,
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
        "a penalty on the gradient with respect to the inputs belongs into the loss, with"
        " torch.autograd.grad(loss, inputs, create_graph=True); one on the batch's gradient with"
        " respect to the weights cannot be split over ranks; what is this rank's own belongs into"
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
        "clipped, scaled or assigned under no_sync(), or zeroed while the default loop accumulates:"
        " this rank's part alone, of which nobody knows afterwards what it counts for",
        "change gradients after the window's last backward, which reduces them",
    ),
    "given_up_on_some_ranks": _FaultKind(
        "some ranks zeroed the gradients of an accumulation window, and others did not",
        "zero_grad() within no_sync() on one rank alone; a model in shards sums each backward over"
        " the ranks at once, so that what is left is the gradient of no objective",
        "zero_grad() on every rank at the same place; to leave a batch out,"
        " gradients.backward(loss, weight=0), in an operator self.backward(loss, weight=0)",
    ),
    "unfrozen_in_window": _FaultKind(
        "a layer was unfrozen within an accumulation window",
        "reproducible=True: where gradients are added up is settled at the window's first batch",
        "unfreeze before the first batch of a window",
        WrongUseError,
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
    "added_parameter": _FaultKind(
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
    "after_bucket_left": _FaultKind(
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
    "unequal_batches": _mixed_weights(
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
