# SPDX-License-Identifier: Apache-2.0
"""`BestNote`: the JSON file beside the file of `KeepBest`, which says what that was saved for."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lockstep.checkpoint import publish

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class BestNote:
    """What the best state of a run was saved for.

    Attributes:
        metric: a key of what `train` or `validate` returned.
        mode: "min" or "max".
        value: the metric's value in this state.
        step: of the state; global batches since the run began.
        of: the method that returned the value; None in a note of an earlier version.
    """

    metric: str
    mode: str
    value: float
    step: int
    of: str | None = None

    def write(self, path: Path) -> None:
        """Write the note to `path`, whole or not at all.

        Raises:
            CheckpointWriteError: the file system refused.
        """
        text = json.dumps(asdict(self)) + "\n"
        publish(path, lambda file: file.write(text.encode()))

    @classmethod
    def read(cls, path: Path) -> BestNote | None:
        """The note at `path`; None without one, and with a warning for one that is unreadable."""
        try:
            found = json.loads(path.read_bytes())
            value, step = float(found["value"]), int(found["step"])
            return cls(found["metric"], found["mode"], value, step, found.get("of"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            _log.warning(
                "%s cannot be read, so that the next value counts as the best: %r", path, error
            )
            return None
