# SPDX-License-Identifier: Apache-2.0
"""The last few checkpoints of one run in a directory of their own, and the newest good one.

The names sort by step, and the steps of a run only grow. A name with a larger step than the one
just written is therefore of a line that the run has left: it was damaged, or the run was taken
back to an older state. Such a file is renamed, so that no run goes on from it; it is not deleted,
because only a person can know what it is worth.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from lockstep.checkpoint.atomic_write import write_error
from lockstep.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger("lockstep.checkpoint")

_NAME: Final = re.compile(r"step-(\d{10,})\.ckpt")
_LEFT_BEHIND: Final = re.compile(r"\.lockstep-[0-9a-f]{16}\.tmp")
_SET_ASIDE: Final = "set-aside-"


class Rotation:
    """Checkpoints of a run, at most `keep` of them.

    Args:
        folder: the run's own; created by `claim`.
        keep: how many to leave when another one is written.
        write: writes one, as `lockstep.checkpoint.write`.
        read: reads and verifies one, as `lockstep.checkpoint.read`.
    """

    def __init__(
        self,
        folder: str,
        keep: int,
        write: Callable[[str, Mapping[str, Any]], str],
        read: Callable[[str], dict[str, Any]],
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._write_one = write
        self._read_one = read

    def claim(self) -> None:
        """Make sure now, and not after an hour, that there is a folder that can be written to.

        Raises:
            CheckpointWriteError: there cannot be one.
        """
        probe = os.path.join(self.folder, f".lockstep-{secrets.token_hex(8)}.tmp")
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(probe, "xb") as file:
                file.write(b"lockstep")
            # The probe, and what a writer that was killed has left: it would fill the disk.
            for name in os.listdir(self.folder):
                if _LEFT_BEHIND.fullmatch(name):
                    _remove(os.path.join(self.folder, name))
        except OSError as error:
            raise write_error(self.folder, error) from error

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, good or not, ascending."""
        with suppress(FileNotFoundError):
            names = map(_NAME.fullmatch, os.listdir(self.folder))
            return sorted(int(name[1]) for name in names if name is not None)
        return []

    def path_of(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step:010d}.ckpt")

    def newest(self) -> tuple[str, dict[str, Any]] | None:
        """The newest good one, with its path; None if there are none at all.

        Raises:
            CheckpointError: there are some, and none of them can be read.
        """
        refused: list[CheckpointError] = []
        for step in reversed(self.steps()):
            path = self.path_of(step)
            try:
                return path, self._read_one(path)
            except CheckpointError as error:
                _log.warning("%s is passed over: %s", path, _in_one_line(error))
                refused.append(error)
        if not refused:
            return None
        raise CheckpointError(
            "no checkpoint here can be read",
            where=self.folder,
            got=f"{len(refused)} of them; the newest: {_in_one_line(refused[0])}",
            fix="bring a good copy back, or give an empty checkpoint_dir to start afresh",
        ) from refused[0]

    def write(self, step: int, state: Mapping[str, Any]) -> str:
        """Write one, then let go of those that are not among the last `keep` any more.

        Returns:
            Its path.

        Raises:
            CheckpointError: see `lockstep.checkpoint.write`; the others are all still there.
        """
        path = self._write_one(self.path_of(step), state)
        try:
            self._let_go(step)
        # The checkpoint is safe. That an older one stays is no reason to say that it is not.
        except OSError as error:
            _log.warning("an older checkpoint in %s could not be removed: %s", self.folder, error)
        return path

    def _let_go(self, newest: int) -> None:
        line = [step for step in self.steps() if step <= newest]
        for step in line[: -self._keep]:
            _remove(self.path_of(step))
        for step in self.steps():
            if step > newest:
                path = self.path_of(step)
                aside = os.path.join(self.folder, _SET_ASIDE + os.path.basename(path))
                _remove(aside)
                os.rename(path, aside)
                _log.warning("%s is ahead of the run, which goes on without it: %s", path, aside)


def _remove(path: str) -> None:
    """A file or a directory; a directory first loses its name, so that it is never half there."""
    if not os.path.isdir(path):
        with suppress(FileNotFoundError):
            os.unlink(path)
        return
    doomed = os.path.join(os.path.dirname(path), f".lockstep-{secrets.token_hex(8)}.tmp")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _in_one_line(error: CheckpointError) -> str:
    got = error.details["got"] or error.details["cause"]
    return f"{error.what} ({got})" if got else error.what
