# SPDX-License-Identifier: Apache-2.0
"""`OptimizerRecorder`: records the gradients that optimizers use in a step, and the weights
after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lockstep.content_digest import content_digest
from lockstep.randomness import RandomState, preserve_rng_state
from lockstep.sync import is_local
from lockstep.sync.optimizer_inspection import given_closure, optimizer_parameters
from lockstep.worker.state_dict import copy_to_cpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.operator import TrainingOperator
    from lockstep.operator.optimizer_step_hooks import OptimizerStepHooks
    from lockstep.operator.training_parts import TrainingParts


@dataclass
class StepRecord:
    """The gradients and weights of one step of a parity trial.

    Attributes:
        gradients: for each time that an optimizer stepped, the gradient of every parameter
            that it holds, by name, as the optimizer found it; on the CPU.
        weights: the parameters after the step.
        linear: names of the parameters whose optimizer does not magnify the rounding error of a
            zero gradient (SGD does not, Adam does).
        has_drawn: random numbers were drawn between the delivery of the batch and the step.
    """

    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    linear: frozenset[str] = frozenset()
    has_drawn: bool = False

    def digest(self) -> str:
        """A hash, equal for two ranks whose gradients and weights are equal bit for bit."""
        return content_digest([self.gradients, self.weights])


class OptimizerRecorder:
    """Records the steps of the optimizers of `operator`; `take` returns the record of a step."""

    def __init__(
        self, operator: TrainingOperator, run: TrainingParts, hooks: OptimizerStepHooks
    ) -> None:
        self._operator = operator
        self._names = user_names(run)
        self._current = StepRecord()
        hooks.add(before=self._before, after=self._after)
        linear = set()
        for optimizer in run.optimizers:
            if type(optimizer) is torch.optim.SGD:
                linear |= {name for name, _ in self._named_parameters(optimizer)}
        self._linear = frozenset(linear)

    def take(self) -> StepRecord:
        """The record of the steps since the last call."""
        taken, self._current = self._current, StepRecord()
        taken.linear = self._linear
        for parameter, name in self._names.values():
            taken.weights[name] = copy_to_cpu(parameter)
        return taken

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if given_closure(args, kwargs) is None:
            self._record(optimizer)

    def _after(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # A closure computes the gradients inside the step.
        if given_closure(args, kwargs) is not None:
            self._record(optimizer)

    def _record(self, optimizer: torch.optim.Optimizer) -> None:
        held = self._named_parameters(optimizer)
        self._current.gradients.append(
            {name: None if p.grad is None else copy_to_cpu(p.grad) for name, p in held}
        )
        delivered = self._operator._lockstep.global_batch.joint_batch
        if delivered is not None and delivered.seed is not None:
            self._current.has_drawn |= _has_drawn_since(delivered.seed)

    def _named_parameters(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in optimizer_parameters(optimizer):
            if id(parameter) in self._names:
                yield self._names[id(parameter)][1], parameter


def user_names(run: TrainingParts) -> dict[int, tuple[torch.Tensor, str]]:
    """The parameters that workers share, by identity, each with the name that a user knows."""
    count = len(run.models)
    prefixes = [""] if count == 1 else [f"models[{number}]." for number in range(count)]
    modules = zip([*prefixes, "criterion."], run.plain_modules(), strict=False)
    return {
        id(parameter): (parameter, prefix + name)
        for prefix, module in modules
        for name, parameter in module.named_parameters()
        if not is_local(parameter)
    }


def _has_drawn_since(seed: int) -> bool:
    """Whether a global generator has another state than the one that `seed` gives it."""
    now = content_digest(RandomState.capture())
    with preserve_rng_state(seed):
        return content_digest(RandomState.capture()) != now
