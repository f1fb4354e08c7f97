# SPDX-License-Identifier: Apache-2.0
"""`RecordListener`: a callback of lockstep's own that gets what each step is compared by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lockstep.trainer.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.metrics.step_log import StepRecord

ON_LOAD: Final = "load_state_dict"
"""What has changed the state of the run, where another state was loaded."""


class RecordListener(Callback):
    """Gets the records of all workers of each step, once, when all workers have committed it."""

    every = 1

    def on_step(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:
        raise AssertionError("`StepMetrics` calls `on_record` instead")

    def on_record(
        self, step: int, metrics: Mapping[str, Any], records: Sequence[StepRecord | None]
    ) -> None:
        """A step has happened.

        Args:
            step: global batches since the run began, this one included.
            metrics: as those of `Callback.on_step`; empty if the operator's loop reports none.
            records: of the workers.
        """
        raise NotImplementedError

    def on_change(self, step: int, what: str) -> None:
        """After `step` something else than training may have changed the state of the run.

        Args:
            what: the method of `TorchTrainer` that did.
        """
