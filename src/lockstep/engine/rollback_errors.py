# SPDX-License-Identifier: Apache-2.0
"""The warning and the error for an interrupted step that cannot be rolled back.

If all its optimizers had stepped, the step is kept, with a warning; otherwise the run ends with the
error.
"""

from __future__ import annotations

import logging

from lockstep.error_texts import NEW_TRAINER, first_line
from lockstep.errors import LockstepError, TrainerClosedError

_log = logging.getLogger("lockstep")


def warn_of_cut_short_step(steps: int, cause: BaseException) -> None:
    """Warn that the last of `steps` steps counts, although its loop failed because of `cause`."""
    _log.warning(
        "step %d counts: its optimizers had stepped when the loop failed (%s: %s). The code of"
        " your loop after optimizer.step() did not run for this step",
        steps - 1,
        type(cause).__name__,
        first_line(cause),
    )


def rollback_impossible_error(cause: BaseException) -> LockstepError:
    """The error that ends living workers which cannot undo the step that `cause` interrupted."""
    error = TrainerClosedError(
        "the workers cannot go back to the last committed step",
        cause="an optimizer had changed the weights when the step was left, and there is no copy of"
        " them from before (an error after optimizer.step() in a train_batch of the operator's own,"
        " in a scheduler, or in an optimizer)",
        fix=NEW_TRAINER,
    )
    error.__cause__ = cause
    return error
