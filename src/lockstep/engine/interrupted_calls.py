# SPDX-License-Identifier: Apache-2.0
"""A call that is left in the middle: by Ctrl-C, or because an operator's code failed.

Until its step is committed, weights that an optimizer has changed cannot be taken back. So Ctrl-C
waits for the end of such a step; an exception cannot.
"""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from lockstep.errors import LockstepError, TrainerClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.worker import Worker


_log = logging.getLogger("lockstep")


class InterruptedEngine(Protocol):
    """An engine whose latest call was left."""

    left: BaseException | None

    def give_up(self) -> None:
        """End the workers, which nobody has asked for anything since."""


_latest_left: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def note_left(engine: InterruptedEngine) -> None:
    """Its workers may have to make room for those of another trainer."""
    _latest_left.add(engine)


def give_up_left() -> None:
    """End the workers of calls that were left, and that nobody has gone on from.

    In a notebook the trainer of before is there until the new one has taken its name.
    """
    for engine in list(_latest_left):
        if engine.left is not None:
            engine.give_up()
    _latest_left.clear()


@contextmanager
def between_steps(worker: Worker) -> Iterator[None]:
    """Inside, a Ctrl-C that comes in an optimizer's step has its effect when it is committed.

    Or when the step fails; and a second one at once. In another thread than the main one nothing
    changes, for Python delivers signals there; nor where the program ignores the signal.
    """
    before: Any = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before):
        yield
        return
    pending: list[Any] = []

    def received(number: int, frame: Any) -> None:
        if worker.has_begun_to_step and not pending:
            pending.append(frame)
        else:
            before(number, frame)

    def take_effect() -> None:
        if pending:
            before(signal.SIGINT, pending.pop())

    signal.signal(signal.SIGINT, received)
    worker.on_boundary = take_effect
    try:
        yield
    finally:
        worker.on_boundary = None
        if signal.getsignal(signal.SIGINT) is received:  # else the program has set another one
            signal.signal(signal.SIGINT, before)
        take_effect()  # also where the step fails, whose error is the context then


def made_room(cause: BaseException) -> TrainerClosedError:
    """Why the workers of a call that was left because of `cause` end when another trainer comes."""
    from lockstep.worker import shown_error  # imports torch, which a launch can do without

    first_line = next(iter(shown_error(cause).splitlines()), "")
    error = TrainerClosedError(
        "another TorchTrainer needed the room of these workers, which were idle since"
        f" {type(cause).__name__}: {first_line}",
        fix="call save() or get_model() before the other trainer is made, or give both fewer"
        " workers; load(path) in a new TorchTrainer goes on from a checkpoint",
    )
    error.__cause__ = cause
    return error


def warn_of_cut_short_step(steps: int, cause: BaseException) -> None:
    """Say that the last of `steps` steps counts, though its loop failed because of `cause`."""
    _log.warning(
        "step %d counts: its optimizers had stepped when the loop failed (%s: %s). What the loop"
        " does behind them in a step was not done for this one",
        steps - 1,
        type(cause).__name__,
        next(iter(str(cause).splitlines()), ""),
    )


def no_way_back(cause: BaseException) -> LockstepError:
    """Why workers that live cannot go on after a call that was left because of `cause`."""
    error = TrainerClosedError(
        "the workers cannot go back to the last committed step",
        cause="an optimizer had changed the weights when the step was left, and there is no copy of"
        " them from before (an error after optimizer.step() in a train_batch of the operator's own,"
        " in a scheduler, or in an optimizer)",
        fix="create a new TorchTrainer; load(path) goes on from a checkpoint",
    )
    error.__cause__ = cause
    return error
