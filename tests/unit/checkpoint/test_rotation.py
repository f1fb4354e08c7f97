# SPDX-License-Identifier: Apache-2.0
"""A rotation finds the newest good checkpoint of a directory, and removes only old ones."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
import torch

from lockstep import checkpoint
from lockstep.checkpoint.rotation import Rotation
from lockstep.checkpoint.temporary_paths import remove_leftovers
from lockstep.errors import CheckpointError, CheckpointWriteError, ConfigurationError
from lockstep.trainer.checkpoint_directory import CheckpointDirectory

if TYPE_CHECKING:
    from collections.abc import Callable

FILE, DIRECTORY = checkpoint.write, checkpoint.write_directory
STATE = {"weight": torch.arange(6.0), "names": ["a", "b"]}


def rotation(folder: Path, keep: int = 3) -> Rotation:
    kept = Rotation(str(folder), keep, checkpoint.read)
    kept.prepare_folder()
    kept.remove_leftovers()
    return kept


def fill(kept: Rotation, *steps: int, write: Callable[..., str] = FILE) -> None:
    for step in steps:
        kept.write(step, partial(write, state={**STATE, "step": step}))


def found(kept: Rotation) -> int:
    newest = kept.read_newest()
    assert newest is not None
    path, state = newest
    assert path == kept.path_of(state["step"])
    assert torch.equal(state["weight"], STATE["weight"])
    step: int = state["step"]
    return step


@pytest.mark.parametrize("write", [FILE, DIRECTORY])
def test_the_last_ones_stay_and_their_names_sort_by_step(tmp_path: Path, write: Any) -> None:
    kept = rotation(tmp_path / "new" / "run", 2)
    assert kept.read_newest() is None
    fill(kept, 5, 10, 100, write=write)
    names = sorted(os.listdir(kept.folder))
    assert names == [Path(kept.path_of(step)).name for step in (10, 100)]
    assert found(kept) == 100


def test_cut_at_any_byte_the_one_before_is_found(tmp_path: Path, caplog: Any) -> None:
    kept = rotation(tmp_path)
    fill(kept, 1, 2)
    newest = Path(kept.path_of(2))
    whole = newest.read_bytes()
    # Its last bytes each, where the mark and the directory of the archive stand.
    for size in {*range(0, len(whole), 7), *range(len(whole) - 300, len(whole))}:
        newest.write_bytes(whole[:size])
        assert found(kept) == 1, f"cut to {size} of {len(whole)} bytes"
    assert str(newest) in caplog.text
    newest.write_bytes(whole)
    assert found(kept) == 2


def test_one_changed_byte_is_found_out(tmp_path: Path) -> None:
    kept = rotation(tmp_path)
    fill(kept, 1, 2)
    newest = Path(kept.path_of(2))
    whole = newest.read_bytes()
    for place in range(0, len(whole), 13):
        newest.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert found(kept) == 1, f"byte {place} changed"


def test_a_directory_that_lacks_a_file_is_passed_over(tmp_path: Path) -> None:
    kept = rotation(tmp_path)
    fill(kept, 1, 2, 3, write=DIRECTORY)
    (next(Path(kept.path_of(3)).glob("*.distcp"))).unlink()
    (Path(kept.path_of(2)) / "lockstep.ckpt").unlink()
    assert found(kept) == 1


def test_what_others_put_there_is_let_be(tmp_path: Path, caplog: Any) -> None:
    """Files and folders of any name, also of ours."""
    kept = rotation(tmp_path, 1)
    torch.save({"step": 9}, kept.path_of(9))
    Path(kept.path_of(8)).write_text("notes")
    Path(kept.path_of(7)).mkdir()
    others = {"notes.txt", "step-12.ckpt", "step-0000000012.ckpt.part", "model.pt"}
    for name in others:
        (tmp_path / name).write_text("mine")
    fill(kept, 5)
    with caplog.at_level(logging.WARNING, "lockstep.checkpoint"):
        assert found(kept) == 5
    left = set(os.listdir(tmp_path))
    assert left >= others
    # Those that would be taken for a newer state of the run are out of the way, and still there.
    aside = {f"set-aside-{Path(kept.path_of(step)).name}" for step in (7, 8, 9)}
    assert left - others == aside | {Path(kept.path_of(5)).name}


def test_going_back_leaves_no_newer_state_to_go_on_from(tmp_path: Path) -> None:
    kept = rotation(tmp_path)
    fill(kept, 10, 20, 30)
    fill(kept, 15)
    assert kept.steps() == [10, 15]
    assert found(kept) == 15


@pytest.mark.parametrize("write", [FILE, DIRECTORY])
def test_a_continuation_that_was_abandoned_is_not_the_runs_own(tmp_path: Path, write: Any) -> None:
    """Also between two checkpoints of the run, and none of it makes an ancestor old."""
    fill(rotation(tmp_path, 100), 900, 1000, 1100, 1200, 1300, 1400, write=write)
    kept = rotation(tmp_path, 3)
    kept.resume_from(kept.path_of(1000))
    fill(kept, 1250, write=write)
    assert kept.steps() == [900, 1000, 1250]
    aside = {f"set-aside-{Path(kept.path_of(step)).name}" for step in (1100, 1200, 1300, 1400)}
    assert {name for name in os.listdir(tmp_path) if name.startswith("set-aside-")} == aside
    fill(kept, 1500, write=write)
    assert kept.steps() == [1000, 1250, 1500]
    kept.go_on_from(1250)
    fill(kept, 1600, write=write)
    assert kept.steps() == [1000, 1250, 1600]


@pytest.mark.parametrize("write", [FILE, DIRECTORY])
@pytest.mark.parametrize("found", [(500, 900), (900, 1000, 1100), (1010,)])
def test_the_checkpoints_of_another_run_are_no_ancestors_of_one_from_elsewhere(
    tmp_path: Path, write: Any, found: tuple[int, ...]
) -> None:
    """Of whatever step they are, and also where it is that of a checkpoint of the run."""
    fill(rotation(tmp_path / "run"), *found, write=write)
    contents = [read_at(tmp_path / "run", name) for name in sorted(os.listdir(tmp_path / "run"))]
    fill(rotation(tmp_path / "another"), 1000, write=write)
    kept = rotation(tmp_path / "run", 2)
    kept.resume_from(rotation(tmp_path / "another").path_of(1000))
    kept.go_on_from(1000)
    for step in (1010, 1020, 1030):
        kept.write(step, partial(write, state={"mine": step}))
    assert kept.steps() == [1020, 1030]
    aside = sorted(name for name in os.listdir(kept.folder) if name.startswith("set-aside-"))
    assert [read_at(tmp_path / "run", name) for name in aside] == contents


def read_at(folder: Path, name: str) -> list[str]:
    state = checkpoint.read(folder / name)
    assert "mine" not in state
    return [f"{key}: {state[key]}" for key in sorted(state)]


def test_a_folder_is_the_same_one_by_any_of_its_names(tmp_path: Path) -> None:
    fill(rotation(tmp_path / "run"), 10, 20)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    kept = rotation(tmp_path / "run", 2)
    kept.resume_from(tmp_path / "link" / "step-0000000020.ckpt")
    fill(kept, 30)
    assert sorted(os.listdir(kept.folder)) == [Path(kept.path_of(step)).name for step in (20, 30)]


@pytest.mark.parametrize("write", [FILE, DIRECTORY])
@pytest.mark.parametrize("name", ["step-0000000020.ckpt", "latest.ckpt"])
def test_a_checkpoint_that_was_moved_behind_a_link_is_the_runs_own(
    tmp_path: Path, write: Any, name: str
) -> None:
    fill(rotation(tmp_path / "run"), 10, 20, write=write)
    kept, moved = rotation(tmp_path / "run"), tmp_path / "another disk"
    newest = Path(kept.path_of(20)).rename(moved)
    Path(kept.path_of(20)).symlink_to(newest)
    Path(kept.path_of(5)).symlink_to(tmp_path / "gone")
    (tmp_path / "run" / "latest.ckpt").symlink_to(kept.path_of(20))
    assert kept.resume_from(tmp_path / "run" / name)
    assert kept.is_newest(20)
    fill(kept, 30, write=write)
    assert kept.steps() == [10, 20, 30]


@pytest.mark.parametrize("write", [FILE, DIRECTORY])
def test_an_abandoned_checkpoint_of_the_same_step_is_not_replaced(
    tmp_path: Path, write: Any
) -> None:
    kept = rotation(tmp_path)
    for step in (10, 20):
        kept.write(step, partial(write, state={"weight": 0}))
    kept.go_on_from(10)
    for weight in (1, 2):  # the second time it is the run's own
        kept.write(20, partial(write, state={"weight": weight}))
    aside = tmp_path / "set-aside-step-0000000020.ckpt"
    assert [checkpoint.read(path)["weight"] for path in (aside, kept.path_of(20))] == [0, 2]
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("first", [FILE, DIRECTORY])
def test_one_of_the_other_form_takes_the_place_of_the_runs_own(tmp_path: Path, first: Any) -> None:
    kept = rotation(tmp_path)
    fill(kept, 10, 20, write=first)
    second, is_folder = (DIRECTORY, True) if first is FILE else (FILE, False)
    for weight in (1, 2):  # the second time it is of the same form
        write = partial(second, state={"weight": weight})
        path = kept.write(20, write, is_folder=is_folder)
        assert os.path.isdir(path) == is_folder
        assert checkpoint.read(path)["weight"] == weight
    assert sorted(os.listdir(tmp_path)) == [Path(kept.path_of(step)).name for step in (10, 20)]


def test_until_the_new_one_is_there_the_last_one_is_not_set_aside(tmp_path: Path) -> None:
    kept = rotation(tmp_path, 1)
    fill(kept, 20)
    kept.go_on_from(10)  # from a file elsewhere
    with pytest.raises(ZeroDivisionError):
        kept.write(20, lambda path: str(1 / 0))
    assert found(kept) == 20


@pytest.mark.parametrize("write", [FILE, DIRECTORY])
def test_going_back_again_keeps_what_was_set_aside_before(tmp_path: Path, write: Any) -> None:
    kept = rotation(tmp_path)
    for weight in range(3):
        kept.write(10, partial(write, state={"weight": weight}))
        kept.write(20, partial(write, state={"weight": weight}))
        kept.write(10, partial(write, state={"weight": weight}))
        assert kept.steps() == [10]
    names = [f"set-aside-{number}step-0000000020.ckpt" for number in ("", "2-", "3-")]
    assert [checkpoint.read(tmp_path / name)["weight"] for name in names] == [0, 1, 2]


def test_if_none_can_be_read_nobody_starts_afresh_without_knowing(tmp_path: Path) -> None:
    kept = rotation(tmp_path)
    fill(kept, 1, 2)
    for step in (1, 2):
        Path(kept.path_of(step)).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint here can be read") as caught:
        kept.read_newest()
    assert "2 of them" in str(caught.value)


def test_a_good_checkpoint_is_not_passed_over_where_memory_is_short(tmp_path: Path) -> None:
    kept = rotation(tmp_path)
    fill(kept, 10)
    kept.write(20, partial(FILE, state={"weight": torch.ones(1 << 26), "step": 20}))
    before, limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), limit))  # a fourth of the weight
    try:
        with pytest.raises((MemoryError, RuntimeError), match="allocate"):
            kept.read_newest()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, limit))
    newest = kept.read_newest()
    assert newest is not None
    assert newest[0] == kept.path_of(20)


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".lockstep-{'0' * 16}.tmp"
    left.write_bytes(b"half a checkpoint")
    (tmp_path / f".lockstep-{'1' * 16}.tmp" / "in it").mkdir(parents=True)
    kept = rotation(tmp_path)
    assert os.listdir(tmp_path) == []
    fill(kept, 1)
    rotation(tmp_path)
    assert found(kept) == 1


@pytest.mark.parametrize("write", [FILE, DIRECTORY])
def test_of_a_checkpoint_that_was_moved_behind_a_link_the_link_is_removed(
    tmp_path: Path, write: Any
) -> None:
    kept, moved = rotation(tmp_path / "run", 1), tmp_path / "moved"
    fill(kept, 1, write=write)
    os.rename(kept.path_of(1), moved)
    os.symlink(moved, kept.path_of(1))
    fill(kept, 2, write=write)
    assert os.listdir(kept.folder) == [Path(kept.path_of(2)).name]
    assert checkpoint.read(moved)["step"] == 1


def test_a_link_to_a_folder_among_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    checkpoint.write_directory(moved, STATE)
    folder.mkdir()
    (folder / f".lockstep-{'0' * 16}.tmp").symlink_to(moved)
    rotation(folder)
    assert os.listdir(folder) == []
    assert torch.equal(checkpoint.read(moved)["weight"], STATE["weight"])


def in_a_file(path: str, meanwhile: Callable[[], None]) -> str:
    def slowly(file: IO[bytes]) -> None:
        checkpoint.serialise({**STATE, "step": 2}, file)
        file.flush()
        meanwhile()

    checkpoint.publish(path, slowly)
    return path


def in_a_directory(path: str, meanwhile: Callable[[], None]) -> str:
    with checkpoint.publish_directory(path) as folder:
        part = checkpoint.write_part(folder, {**STATE, "step": 2}, rank=0)
        meanwhile()
        checkpoint.finish_directory(folder, [part], part.state)
    return path


@pytest.mark.parametrize("write", [in_a_file, in_a_directory])
@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_second_trainer_leaves_what_is_being_written(
    tmp_path: Path, resume: str | None, write: Any
) -> None:
    kept = rotation(tmp_path)
    fill(kept, 1)

    def begin_another() -> None:
        with nullcontext() if resume else pytest.raises(ConfigurationError, match="resume=None"):
            CheckpointDirectory(tmp_path, None, 3, resume, "replicate")

    kept.write(2, partial(write, meanwhile=begin_another))
    assert found(kept) == 2


def test_another_writer_to_the_folder_leaves_one_that_waits_for_its_name(tmp_path: Path) -> None:
    """`KeepBest` may save there while an abandoned checkpoint of the step is still in its place."""
    kept = rotation(tmp_path)
    fill(kept, 10, 20)
    kept.go_on_from(10)

    def write(path: str) -> str:
        FILE(path, {**STATE, "step": 20})
        FILE(tmp_path / "best.pt", STATE)
        return path

    kept.write(20, write)
    assert found(kept) == 20
    assert len(os.listdir(tmp_path)) == 4


@pytest.mark.parametrize("is_own", [True, False])
def test_without_locks_only_who_has_the_folder_for_itself_removes_anything(
    tmp_path: Path, monkeypatch: Any, is_own: bool
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / f".lockstep-{'0' * 16}.tmp").touch()
    remove_leftovers(str(tmp_path), is_own=is_own)
    assert bool(os.listdir(tmp_path)) is not is_own


def test_a_trainer_that_is_refused_leaves_the_directory_as_it_is(tmp_path: Path) -> None:
    fill(rotation(tmp_path), 1)
    (tmp_path / f".lockstep-{'0' * 16}.tmp").touch()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigurationError, match="resume=None"):
        CheckpointDirectory(tmp_path, None, 3, None, "replicate")
    assert sorted(os.listdir(tmp_path)) == before


def test_where_nothing_can_be_written_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/lockstep")):
        with pytest.raises(CheckpointWriteError) as caught:
            rotation(folder)
        assert str(folder) in str(caught.value)


def test_a_full_disk_is_noticed_before_training(tmp_path: Path) -> None:
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as on a full disk, files open empty
    try:
        with pytest.raises(CheckpointWriteError):
            rotation(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
