# SPDX-License-Identifier: Apache-2.0
"""Protocols of the loops: the operator that they train, and the iterator that a worker gives them.

The modules that `training_operator` imports take the operator as an argument. They annotate it with
the `Operator` protocol, which avoids a circle of imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

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

    def train_epoch(self, iterator: Any, info: dict[str, Any]) -> dict[str, Any]: ...

    def validate(self, val_iterator: Any, info: dict[str, Any]) -> dict[str, Any]: ...

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any: ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...

    def after_step(self) -> None: ...

    @classmethod
    def _lockstep_overrides(cls, method: Callable[..., Any]) -> bool: ...

    @classmethod
    def _lockstep_overrides_loop(cls) -> bool: ...


@runtime_checkable
class PassIterator(Protocol):
    """What a worker gives `train_epoch` and `validate`: the batches of a pass over the data.

    A loop of the user's own may give the default one another iterable instead. A worker's
    `BatchIterator` is handed over as this type, so that mypy compares the names of its members.
    """

    @property
    def step_in_epoch(self) -> int:
        """Committed global batches of this epoch, those of earlier calls included."""

    @property
    def is_epoch_over(self) -> bool:
        """Whether the epoch's last batch was delivered."""

    def __iter__(self) -> Iterator[Any]: ...


def place_in_epoch(iterator: Iterable[Any]) -> int:
    """The number of a loop's next batch in its epoch; an iterable of the user's own is an epoch."""
    return iterator.step_in_epoch if isinstance(iterator, PassIterator) else 0


def is_epoch_over(iterator: Iterable[Any]) -> bool:
    """Whether a loop has come to the epoch's end, as behind an iterable of the user's own."""
    return iterator.is_epoch_over if isinstance(iterator, PassIterator) else True


def rank_and_step(operator: Operator) -> str:
    """``rank R, step S``, for the `where` of an error; the first step is 1, as for a replay."""
    return f"rank {operator.world_rank}, step {operator.global_step + 1}"
