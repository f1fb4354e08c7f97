# SPDX-License-Identifier: Apache-2.0
"""`CallbackList`: calls the callbacks of a trainer for its events, in the order given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import WrongTypeError
from lockstep.trainer.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class CallbackList:
    """Calls callbacks for the events of `trainer`.

    Args:
        callbacks: the user's callbacks.
        trainer: the `TorchTrainer` that is passed to callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback], trainer: Any) -> None:
        self._callbacks = callbacks
        self._trainer = trainer
        self._has_told_failure = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    @property
    def want_stop(self) -> bool:
        """Whether a callback has set a `stop_reason`."""
        return any(callback.stop_reason is not None for callback in self._callbacks)

    def start(self) -> None:
        """See `Callback.on_start`."""
        for callback in self._callbacks:
            _tell(callback, callback.on_start, Callback.on_start, self._trainer)

    def train_end(self, result: dict[str, Any]) -> None:
        """See `Callback.on_train_end`."""
        for callback in self._callbacks:
            # A copy for each callback: changes by one must not reach the next one, or the caller.
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
        """See `Callback.on_failure`; called for the first error only."""
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
    """Call `method`, the `event` of `callback`, and refuse a result, which nobody would read."""
    returned = method(*args)
    if returned is None:
        return
    raise WrongTypeError(
        f"{type(callback).__name__}.{event.__name__} returned something, which nobody reads",
        got=f"{returned!r:.60}",
        expected="None",
        fix="to end training: self.stop_reason = '...', and trainer.should_stop in the loop",
    )
