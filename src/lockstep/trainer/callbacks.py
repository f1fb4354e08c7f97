# SPDX-License-Identifier: Apache-2.0
"""`Callback`: the base class of users' callbacks on the driver (logging, stopping, saving)."""

from __future__ import annotations

from typing import Any, TypeAlias

Trainer: TypeAlias = Any
"""The `TorchTrainer`, which imports this module. Not a protocol: a callback that says
``trainer: TorchTrainer`` would then be refused by the type checker."""


class Callback:
    """Override what you need; every method runs in the driver's process, and returns nothing.

    ``TorchTrainer(callbacks=[...])`` calls them in the order given. An exception in one
    reaches the caller of the trainer's method; the workers live on. The trainer's own methods
    may be called from all of them but `on_progress`,
    `on_step` and `on_failure`.

    Attributes:
        every: `on_step` is called each so many steps; None: never.
        stop_reason: why training should end, or None. Set it, and ``trainer.should_stop`` is
            True, which the loop around `train` and `validate` asks.
    """

    every: int | None = None
    stop_reason: str | None = None

    def on_start(self, trainer: Trainer) -> None:
        """The workers are ready."""

    def on_progress(self, trainer: Trainer, progress: dict[str, Any]) -> None:
        """A `train` or `validate` call begins, or goes on: called as it begins, then once a second.

        Args:
            progress: ``phase`` ("train" or "validation"), and of this call so far ``seconds``,
                ``steps``, ``samples`` (over all workers) and ``loss`` (of rank 0's latest batch;
                None before there is one); ``workers`` and ``recoveries`` of the run, where
                workers are processes of their own and it can go on without one.

        An exception raised here is raised by `train` or `validate` after the workers have finished
        the call.
        """

    def on_step(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        """`every` further optimizer steps (global batches) have happened in a `train` call.

        Called while the call runs, some tenths of a second late, and at its end for those that are
        left; once for each step, also where a recovery computes steps again. As in `on_progress`,
        the trainer's methods cannot be called, and `train` raises an exception of this method
        after the workers have finished the call.

        Args:
            step: steps since the run began; `every` divides it.
            metrics: means over all samples of these steps, on all workers; their ``num_samples``,
                ``batch_count`` and ``epoch``. A worker that was lost may be missing in them.
        """

    def on_train_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
        """A `train` call has ended; `result` is what it returns, reduced over workers."""

    def on_validate_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
        """A `validate` call has ended."""

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """The run ends by `error`.

        Called once, for the first error that leaves the ``with`` block, ends the workers, or ends
        the latest call before `shutdown`; at the latest by `shutdown`. Also called if a later
        callback's `on_start` raises. `on_shutdown` follows only where the latest call came to its
        end.
        """

    def on_shutdown(self, trainer: Trainer) -> None:
        """The trainer is about to end its workers, whose last call came to its end."""
