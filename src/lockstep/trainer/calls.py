# SPDX-License-Identifier: Apache-2.0
"""How the driver's side of a trainer reaches its workers: one call at a time, while it is open."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from lockstep.trainer.call_errors import (
    has_ended,
    tell,
    two_calls,
    was_shut_down,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lockstep.trainer.callbacks import Callback
    from lockstep.trainer.step_metrics import StepMetrics
    from lockstep.worker import WorkerSpec


class Calls:
    """What every part of a trainer needs: its workers, and who listens."""

    _spec: WorkerSpec
    _steps: StepMetrics

    def __init__(self) -> None:
        self._engine: Any = None
        self._calling = threading.Lock()

    @property
    def _callbacks(self) -> Sequence[Callback]:
        return self._steps.callbacks

    def _tell(self, event: str, *results: dict[str, Any]) -> None:
        for callback in self._callbacks:
            # A copy for each: what one takes out of it the next, and the caller, still get.
            tell(callback, event, self, *map(dict, results))

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self._check_open()
        with self._one_call_at_a_time(method):
            answers: list[Any] = self._engine.call(method, *args, **kwargs)
        return answers

    def _call_rank(self, rank: int, method: str, *args: Any) -> Any:
        self._check_open()
        with self._one_call_at_a_time(method):
            return self._engine.call_rank(rank, method, *args)

    def _from_rank_0(self, method: str) -> Any:
        if self._spec.options.sync == "fsdp":
            return self._call("whole", method)[0]  # each rank has a part of it
        return self._call_rank(0, method)

    @contextlib.contextmanager
    def _one_call_at_a_time(self, method: str) -> Iterator[None]:
        """Two calls at once would take turns with the batches, the model and the metrics."""
        if not self._calling.acquire(blocking=False):
            raise two_calls(method)
        try:
            yield
        finally:
            self._calling.release()

    def _check_open(self) -> None:
        if self._engine is None:
            raise was_shut_down()
        if self._engine.left is not None:
            with self._one_call_at_a_time("a call"):
                self._engine.settle()
        if self._engine.ended is not None:
            reason = self._engine.ended
            raise has_ended(reason, self._spec) from reason
