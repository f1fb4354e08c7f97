# SPDX-License-Identifier: Apache-2.0
"""Hooks on optimizers that refuse a step which would put the first NaN or infinity into weights.

The hook checks the gradients when an optimizer is about to step with them: after the reduction, so
that every rank finds the same; after unscaling and clipping; and not where a GradScaler leaves
the step out. One norm over all of them: half of what plain SGD's own pass costs.

A step with finite gradients overflows only where they, or the learning rate, are enormous; a
step that is given a closure computes its gradients itself. Before such a step the hook copies
the weights and the optimizer's state, and after it the hook checks the weights.

The ranks check tensors in shards together, and each rank checks its other tensors alone: those of
`lockstep.local` parameters may be finite on one rank and not on another. So what a rank finds in
them decides about no check of shards, for which it would wait alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import sparse_indices_and_values
from lockstep.error_texts import first_of
from lockstep.errors import NonFiniteError
from lockstep.operator.state_copy import StateCopy
from lockstep.sync import is_local
from lockstep.sync.optimizer_inspection import given_closure, optimizer_parameters
from lockstep.tensor_copies import is_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.optim import Optimizer

    from lockstep.operator.loop_protocols import Operator
    from lockstep.operator.optimizer_step_hooks import OptimizerStepHooks
    from lockstep.operator.training_parts import TrainingParts

SKIP_CHECK: Final = "TorchTrainer(check_finite=False) steps all the same"

FIX: Final = (
    "look at these samples and layers (log or sqrt of 0, a division by an empty count, a learning"
    f" rate that is too large); {SKIP_CHECK}"
)


def add_non_finite_checks(
    operator: Operator, run: TrainingParts, hooks: OptimizerStepHooks
) -> None:
    """Let `hooks` refuse a step which is not finite."""
    if operator._lockstep.context.options.check_finite:
        check = _StepCheck(operator, run)
        hooks.add(before=check.before, after=check.after)


class _StepCheck:
    """The check before, and where it is needed after, each step."""

    def __init__(self, operator: Operator, run: TrainingParts) -> None:
        self._operator = operator
        self._run = run
        # More than one where a step begins within the closure of another one's.
        self._copies: dict[Optimizer, tuple[StateCopy, list[torch.Tensor]]] = {}

    def before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._copies.pop(optimizer, None)
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a fused optimizer, which skips a step with infinities by itself
        may_overflow: list[torch.Tensor] = []
        for parameters in _by_who_checks(optimizer_parameters(optimizer)):
            if given_closure(args, kwargs) is not None:
                may_overflow += parameters
                continue
            gradients = [p.grad for p in parameters if p.grad is not None]
            norm = _norm(gradients)
            if not math.isfinite(norm) and not _are_finite(gradients):
                self._refuse_gradients(parameters)
            if _may_overflow(gradients, _learning_rates(optimizer), norm):
                may_overflow += parameters
        if may_overflow:
            copied = StateCopy(optimizer_parameters(optimizer), [optimizer])
            self._copies[optimizer] = copied, may_overflow

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        before, parameters = self._copies.pop(optimizer, (None, []))
        checked = _by_who_checks(parameters)
        bad = next((each for each in checked if not _are_finite(each)), None)
        if before is None or bad is None:
            return
        found = [p for p in bad if not _are_finite([p])]
        before.restore()
        self._operator._lockstep.steps_taken_back += 1
        rates = ", ".join(f"{rate:g}" for rate in _learning_rates(optimizer))
        has_closure = given_closure(args, kwargs) is not None
        raise self._error(
            "a step put NaN or infinity into the weights, which are as they were before it",
            f"{self._format_names(found)}; learning rate {rates or 'unknown'}",
            "a loss, or its gradient, within the step's closure is not finite"
            if has_closure
            else "the gradients are finite, and the step itself overflowed",
            found,
        )

    def _refuse_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        found = [p for p in parameters if p.grad is not None and not _are_finite([p.grad])]
        raise self._error(
            "a step would put NaN or infinity into the weights, and was not taken",
            f"the gradient of {self._format_names(found)}",
            "a loss or a gradient that is not finite, on this rank or on another",
            found,
        )

    def _format_names(self, found: list[torch.Tensor]) -> str:
        run = self._run
        names = {
            id(p): f"{number}.{name}" if len(run.models) > 1 else name
            for number, module in enumerate(run.modules())
            for name, p in module.named_parameters()
        }
        return first_of([f"`{names.get(id(p), tuple(p.shape))}`" for p in found], 4)

    def _error(self, what: str, got: str, cause: str, found: list[torch.Tensor]) -> NonFiniteError:
        operator = self._operator
        found_on_all_ranks = any(not is_local(p) for p in found)
        # Reduced gradients are equal on all ranks: the error names a rank only for local ones.
        rank = "" if found_on_all_ranks else f"rank {operator.world_rank}, "
        where = f"{rank}step {operator.global_step + 1}"
        error = NonFiniteError(what, where=where, got=got, cause=cause, fix=FIX)
        error.found_on_all_ranks = found_on_all_ranks
        return error


def _learning_rates(optimizer: Optimizer) -> list[float]:
    """The learning rates of the groups; empty for optimizers without a rate."""
    given = [group.get("lr") for group in optimizer.param_groups]
    return [float(rate) for rate in given if rate is not None]


def _by_who_checks(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """`tensors` in shards, then the others; torch takes no norm of both together."""
    shards: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for each in tensors:
        (shards if is_shard(each) else others).append(each)
    return [each for each in (shards, others) if each]


def _may_overflow(gradients: Iterable[torch.Tensor], rates: Sequence[float], norm: float) -> bool:
    """Whether a squared gradient, or one times the learning rate, may leave the dtype's range."""
    # The dtypes of gradients, not of weights: weights in four bits are held as integers.
    dtypes = {gradient.dtype for gradient in gradients}
    # `max` keeps a NaN or drops it, by its place.
    largest = max(norm, 1.0) * max([1.0, *rates]) if all(map(math.isfinite, rates)) else math.nan
    return any(not largest < math.sqrt(torch.finfo(dtype).max) for dtype in dtypes)


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    dense = [sparse_indices_and_values(each)[1] if each.is_sparse else each for each in tensors]
    return float(torch.nn.utils.get_total_norm(dense)) if dense else 0.0


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    if math.isfinite(_norm([each.detach() for each in tensors])):
        return True
    # The squares of large numbers may overflow where the numbers do not.
    dense = [sparse_indices_and_values(each)[1] if each.is_sparse else each for each in tensors]
    return all(bool(each.isfinite().all()) for each in dense)
