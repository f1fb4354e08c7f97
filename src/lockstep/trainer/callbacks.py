# SPDX-License-Identifier: Apache-2.0
"""What happens on the driver around each call: logging, stopping, keeping the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.operator import TrainingOperator
    from lockstep.trainer import TorchTrainer


class Callback:
    """Override what you need; every method runs in the driver's process.

    ``TorchTrainer(callbacks=[...])`` calls them in the order given. An exception in one
    reaches the caller of the trainer's method; the workers live on. The trainer's own methods
    may be called from all of them but `on_failure`.

    Attributes:
        stop_reason: why training should end, or None. Set it, and ``trainer.should_stop`` is
            True, which the loop around `train` and `validate` asks.
    """

    stop_reason: str | None = None

    def on_start(self, trainer: TorchTrainer) -> None:
        """The workers are ready."""

    def on_train_end(self, trainer: TorchTrainer, result: dict[str, Any]) -> None:
        """A `train` call has ended; `result` is what it returns, reduced over workers."""

    def on_validate_end(self, trainer: TorchTrainer, result: dict[str, Any]) -> None:
        """A `validate` call has ended."""

    def on_failure(self, trainer: TorchTrainer, error: BaseException) -> None:
        """The run ends by `error`, which left the ``with`` block or has ended the workers.

        Called once, at the latest by `shutdown`, and before `on_shutdown`, which is called
        only if the workers still live.
        """

    def on_shutdown(self, trainer: TorchTrainer) -> None:
        """The trainer is about to end its workers."""


def steps_done(trainer: TorchTrainer) -> int:
    """Optimizer steps (global batches) since the run began, also before it was loaded."""
    steps: int = trainer.apply_all_operators(_global_step)[0]
    return steps


def _global_step(operator: TrainingOperator) -> int:
    return operator.global_step
