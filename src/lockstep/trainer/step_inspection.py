# SPDX-License-Identifier: Apache-2.0
"""`StepInspection`: looks at steps of a run while they are computed again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lockstep.trainer.record_listener import RecordListener

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from lockstep.metrics.step_log import StepRecord


class StepInspection(RecordListener):
    """A callback of the trainer that computes the steps. This class itself looks at nothing.

    Args:
        steps: their numbers, in order.
    """

    def __init__(self, steps: range) -> None:
        self.steps = steps

    def around(self, trainer: Any) -> AbstractContextManager[None]:
        """A context around the computation of the steps."""
        return nullcontext()

    def on_record(
        self, step: int, metrics: Mapping[str, Any], records: Sequence[StepRecord | None]
    ) -> None:
        """See `RecordListener`."""
