# SPDX-License-Identifier: Apache-2.0
"""The callbacks of a trainer, told of its events in the order given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import WrongTypeError
from lockstep.trainer.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class CallbackList:
    """Tells callbacks what happens to `trainer`.

    Args:
        callbacks: those of the user.
        trainer: the `TorchTrainer` that callbacks are given.
    """

    def __init__(self, callbacks: Sequence[Callback], trainer: Any) -> None:
        self._callbacks = callbacks
        self._trainer = trainer
        self._has_told_failure = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    @property
    def want_stop(self) -> bool:
        """A callback has a reason to train no further."""
        return any(callback.stop_reason is not None for callback in self._callbacks)

    def start(self) -> None:
        """See `Callback.on_start`."""
        for callback in self._callbacks:
            _tell(callback, callback.on_start, Callback.on_start, self._trainer)

    def train_end(self, result: dict[str, Any]) -> None:
        """See `Callback.on_train_end`."""
        for callback in self._callbacks:
            # A copy for each: what one takes out of it the next, and the caller, still get.
            _tell(
                callback, callback.on_train_end, Callback.on_train_end, self._trainer, dict(result)
            )

    def validate_end(self, result: dict[str, Any]) -> None:
        """See `Callback.on_validate_end`."""
        for callback in self._callbacks:
            _tell(
                callback,
                callback.on_validate_end,
                Callback.on_validate_end,
                self._trainer,
                dict(result),
            )

    def progress(self, callback: Callback, progress: dict[str, Any]) -> None:
        """See `Callback.on_progress`."""
        _tell(callback, callback.on_progress, Callback.on_progress, self._trainer, progress)

    def step(self, callback: Callback, step: int, metrics: dict[str, Any]) -> None:
        """See `Callback.on_step`."""
        _tell(callback, callback.on_step, Callback.on_step, self._trainer, step, metrics)

    def failure(self, error: BaseException) -> None:
        """See `Callback.on_failure`; only the first error is told."""
        if not self._has_told_failure:
            self._has_told_failure = True
            for callback in self._callbacks:
                callback.on_failure(self._trainer, error)

    def shutdown(self) -> None:
        """See `Callback.on_shutdown`."""
        for callback in self._callbacks:
            _tell(callback, callback.on_shutdown, Callback.on_shutdown, self._trainer)


def _tell(
    callback: Callback, method: Callable[..., object], event: Callable[..., object], *args: object
) -> None:
    """Call `method`, which is `event` of `callback`, and refuse a result: no caller reads it."""
    returned = method(*args)
    if returned is None:
        return
    raise WrongTypeError(
        f"{type(callback).__name__}.{event.__name__} returned something, which nobody reads",
        got=f"{returned!r:.60}",
        expected="None",
        fix="to end training: self.stop_reason = '...', and trainer.should_stop in the loop",
    )
