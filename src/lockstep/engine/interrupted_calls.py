# SPDX-License-Identifier: Apache-2.0
"""A call that ends in the middle, by Ctrl-C or because an operator's code failed; workers live on.

The error arrives at once. What the workers were doing is undone when the next call comes, or never:
where another trainer needs their room, they end.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, Final, Protocol

from lockstep.errors import LockstepError, TrainerClosedError

_log = logging.getLogger("lockstep")


class InterruptibleEngine(Protocol):
    """An engine whose workers outlive an interrupted call."""

    interrupted_by: BaseException | None

    def end_unused(self) -> None:
        """End the workers, which have not been called since their call was interrupted."""


_interrupted: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def note_interrupted(engine: InterruptibleEngine) -> None:
    """The engine's workers may have to make room for those of another trainer."""
    _interrupted.add(engine)


def end_interrupted() -> None:
    """End the workers of interrupted calls that no later call has undone.

    In a notebook the trainer of before lives until the new one has taken its name.
    """
    for engine in list(_interrupted):
        if engine.interrupted_by is not None:
            engine.end_unused()
    _interrupted.clear()


def room_was_needed(cause: BaseException) -> TrainerClosedError:
    """Why the workers of a call that `cause` interrupted end when another trainer comes."""
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
    """Why workers that live cannot go on after a call that `cause` interrupted."""
    error = TrainerClosedError(
        "the workers cannot go back to the last committed step",
        cause="an optimizer had changed the weights when the step was left, and there is no copy of"
        " them from before (an error after optimizer.step() in a train_batch of the operator's own,"
        " in a scheduler, or in an optimizer)",
        fix="create a new TorchTrainer; load(path) goes on from a checkpoint",
    )
    error.__cause__ = cause
    return error
