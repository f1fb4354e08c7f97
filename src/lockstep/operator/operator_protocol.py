# SPDX-License-Identifier: Apache-2.0
"""The `Operator` protocol: the members of `TrainingOperator` that the default loops call.

`TrainingOperator` hands itself to functions of modules that it imports. Those name this protocol,
so that no module imports a module by which it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from lockstep.metrics import TimerCollection
    from lockstep.operator.operator_state import OperatorState


class Operator(Protocol):
    """The members of a `TrainingOperator` that the default loops call; documented there."""

    joint_loss: ClassVar[bool]
    loss_reduction: str
    global_step: int
    timers: TimerCollection
    _lockstep: OperatorState

    @property
    def device(self) -> torch.device: ...

    @property
    def world_rank(self) -> int: ...

    @property
    def scheduler_step_freq(self) -> str | None: ...

    def register(
        self, *, models: Any, optimizers: Any, criterion: Any = None, schedulers: Any = None
    ) -> tuple[Any, ...]: ...

    def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None: ...

    def to_device(self, batch: Any) -> Any: ...

    def compute_loss(self, batch: Any, batch_info: Mapping[str, Any]) -> Any: ...

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]: ...

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]: ...

    def after_step(self) -> None: ...

    @classmethod
    def _overrides(cls, method: str) -> bool: ...

    @classmethod
    def _overrides_loop(cls) -> bool: ...


def rank_and_step(operator: Operator) -> str:
    """``rank R, step S``, for the `where` of an error."""
    return f"rank {operator.world_rank}, step {operator.global_step}"
