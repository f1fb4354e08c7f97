# SPDX-License-Identifier: Apache-2.0
"""`CallbackList`: calls the callbacks of a trainer for its events, in the order given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import WrongTypeError
from lockstep.trainer.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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

    def overriding(self, event: Callable[..., None]) -> list[Callback]:
        """The callbacks that override `event`, a method of `Callback`."""
        return [
            each
            for each in self._callbacks
            if getattr(getattr(each, event.__name__), "__func__", None) is not event
        ]

    @property
    def want_stop(self) -> bool:
        """Whether a callback has set a `stop_reason`."""
        return any(callback.stop_reason is not None for callback in self._callbacks)

    def start(self) -> None:
        """See `Callback.on_start`; an error of one is told to those that were started before it."""
        for number, callback in enumerate(self._callbacks):
            try:
                self.tell(callback, Callback.on_start)
            except BaseException as error:
                # The user gets no trainer, whose `shutdown` would end what they have begun.
                self._tell_failure(self._callbacks[:number], error)
                raise

    def train_end(self, result: dict[str, Any]) -> None:
        """See `Callback.on_train_end`."""
        for callback in self._callbacks:
            # A copy for each callback: changes by one must not reach the next one, or the caller.
            self.tell(callback, Callback.on_train_end, dict(result))

    def validate_end(self, result: dict[str, Any]) -> None:
        """See `Callback.on_validate_end`."""
        for callback in self._callbacks:
            self.tell(callback, Callback.on_validate_end, dict(result))

    def failure(self, error: BaseException) -> None:
        """See `Callback.on_failure`; called for the first error only."""
        if not self._has_told_failure:
            self._has_told_failure = True
            self._tell_failure(self._callbacks, error)

    def _tell_failure(self, callbacks: Sequence[Callback], error: BaseException) -> None:
        for callback in callbacks:
            callback.on_failure(self._trainer, error)

    def shutdown(self) -> None:
        """See `Callback.on_shutdown`."""
        for callback in self._callbacks:
            self.tell(callback, Callback.on_shutdown)

    def tell(self, callback: Callback, event: Callable[..., None], *args: object) -> None:
        """Call the method `event` of `callback`, and refuse a result, which nobody would read."""
        name = event.__name__
        returned = getattr(callback, name)(self._trainer, *args)
        if returned is None:
            return
        raise WrongTypeError(
            f"{type(callback).__name__}.{name} returned something, which nobody reads",
            got=f"{returned!r:.60}",
            expected="None",
            fix="to end training: self.stop_reason = '...', and trainer.should_stop in the loop",
        )
