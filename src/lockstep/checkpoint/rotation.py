# SPDX-License-Identifier: Apache-2.0
"""Keeps the last few checkpoints of one run in a directory, and finds the newest good one.

A run's own are those that it has written, the one in the folder that it has resumed from, and the
older ones there. The names sort by step, and the steps of a run only grow, until the run goes back:
the newest checkpoint could not be read when the run resumed, or the user loaded an older state.
Then later ones are of a continuation that was abandoned. And a run that has begun with a state
from elsewhere may find another run's checkpoints in the folder. `Rotation` renames what is not the
run's own, so that no run resumes from it, and does not delete it: only a person can know what it is
worth.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

from lockstep.checkpoint.atomic_write import sync_new_name, write_error
from lockstep.checkpoint.temporary_paths import (
    held_path,
    moved_away,
    new_temporary_path,
    remove,
    remove_leftovers,
)
from lockstep.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("lockstep.checkpoint")

_NAME: Final = re.compile(r"step-(\d{10,})\.ckpt")
_SET_ASIDE: Final = "set-aside-"


class Rotation:
    """Checkpoints of a run, at most `keep` of them.

    Args:
        folder: the run's own folder; `prepare_folder` creates it.
        keep: how many checkpoints remain after `write`.
        read: reads and verifies a checkpoint, as `lockstep.checkpoint.read`.
    """

    def __init__(self, folder: str, keep: int, read: Callable[[str], dict[str, Any]]) -> None:
        self.folder = folder
        self._keep = keep
        self._read_one = read
        # The steps of the run's own checkpoints; some may have been removed since.
        self._own: set[int] = set()

    def prepare_folder(self) -> None:
        """Create the folder, and try to write to it.

        Called when a run starts: a folder that cannot be written to fails the run at once, and not
        at its first checkpoint.

        Raises:
            CheckpointWriteError: the folder cannot be created or written to.
        """
        probe = new_temporary_path(self.folder)
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(probe, "xb") as file:
                file.write(b"lockstep")
            remove(probe)
        except OSError as error:
            raise write_error(self.folder, error) from error

    def remove_leftovers(self) -> None:
        """Remove what killed writers have left in the folder.

        Raises:
            CheckpointWriteError: the folder cannot be read or written to.
        """
        try:
            remove_leftovers(self.folder, is_own=True)
        except OSError as error:
            raise write_error(self.folder, error) from error

    def steps(self) -> list[int]:
        """The steps of the checkpoints in the folder, readable or not, in ascending order."""
        with suppress(FileNotFoundError):
            names = map(_NAME.fullmatch, os.listdir(self.folder))
            return sorted(int(name[1]) for name in names if name is not None)
        return []

    def path_of(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step:010d}.ckpt")

    def read_newest(self) -> tuple[str, dict[str, Any]] | None:
        """Read the newest good checkpoint: its path and its state; None if the folder has none.

        Raises:
            CheckpointError: the folder has checkpoints, and none of them can be read.
        """
        refused: list[CheckpointError] = []
        for step in reversed(self.steps()):
            path = self.path_of(step)
            try:
                return path, self._read_one(path)
            except CheckpointError as error:
                _log.warning("%s is passed over: %s", path, _one_line_of(error))
                refused.append(error)
        if not refused:
            return None
        raise CheckpointError(
            "no checkpoint here can be read",
            where=self.folder,
            got=f"{len(refused)} of them; the newest: {_one_line_of(refused[0])}",
            fix="bring a good copy back, or give an empty checkpoint_dir to start afresh",
        ) from refused[0]

    def is_newest(self, step: int) -> bool:
        """Whether the newest checkpoint of the run is of `step`."""
        return [each for each in self.steps() if each in self._own][-1:] == [step]

    def resume_from(self, path: str | os.PathLike[str]) -> bool:
        """Note that the run resumes from `path`, which may be elsewhere, as another run's may.

        Returns:
            Whether `path` is one of the checkpoints in the folder.
        """
        # Not by its name: it may be a link to one of them, and one of them a link to another disk.
        steps = [each for each in self.steps() if os.path.exists(self.path_of(each))]
        found = [each for each in steps if os.path.samefile(self.path_of(each), path)]
        if found:
            self._own = {each for each in self.steps() if each <= found[-1]}
        return bool(found)

    def go_on_from(self, step: int) -> None:
        """Note that the run goes on from a state of `step`, which it has read.

        The next `write` sets the checkpoints of later steps aside.
        """
        self._own = {each for each in self._own if each <= step}

    def write(self, step: int, write: Callable[[str], str], *, is_folder: bool = False) -> str:
        """Write a checkpoint, then remove those that are not among the last `keep` any more.

        Those that are not the run's own are set aside.

        Args:
            step: of the run.
            write: writes the checkpoint to a path, and returns that.
            is_folder: what `write` writes is a folder, and no file.

        Returns:
            The path of the checkpoint.

        Raises:
            Exception: what `write` raised; no older checkpoint was removed.
        """
        self.go_on_from(step)
        # The others stay until the new one is there: a folder without any would start a run afresh.
        path, is_own = self.path_of(step), step in self._own
        if not os.path.lexists(path) or (is_own and os.path.isdir(path) == is_folder):
            write(path)
        else:
            with held_path(self.folder, os.mkdir) as place:
                try:
                    new = write(os.path.join(place, os.path.basename(path)))
                    if not is_own:
                        self._set_aside(step)
                    # One of the run's own is of the other form where its `sync` has changed.
                    with moved_away(path) if is_own else nullcontext():
                        os.rename(new, path)
                        sync_new_name(self.folder, path)
                finally:
                    shutil.rmtree(place, ignore_errors=True)
        self._own.add(step)
        try:
            for each in self.steps():
                if each not in self._own:
                    self._set_aside(each)
            for each in self.steps()[: -self._keep]:
                remove(self.path_of(each))
        # The new checkpoint is on the disk: an older one that stays must not fail the run.
        except OSError as error:
            _log.warning("an older checkpoint in %s could not be removed: %s", self.folder, error)
        return path

    def _set_aside(self, step: int) -> None:
        path = self.path_of(step)
        aside = set_aside(path)
        _log.warning("%s is not of this run, which goes on without it: %s", path, aside)


def set_aside(path: str) -> str:
    """Rename the file or folder at `path`, beside all that were set aside before it.

    Returns:
        Its new path.
    """
    folder, name = os.path.split(path)
    numbers = itertools.chain([""], (f"{number}-" for number in itertools.count(2)))
    names = (os.path.join(folder, f"{_SET_ASIDE}{number}{name}") for number in numbers)
    aside = next(each for each in names if not os.path.lexists(each))
    os.rename(path, aside)
    return aside


def _one_line_of(error: CheckpointError) -> str:
    got = error.details["got"] or error.details["cause"]
    return f"{error.what} ({got})" if got else error.what
