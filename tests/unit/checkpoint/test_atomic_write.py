# SPDX-License-Identifier: Apache-2.0
"""Full disks, killed writers and wrong folders leave the old checkpoint as it was."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import lockstep
from lockstep import checkpoint
from lockstep.checkpoint.temporary_paths import remove_leftovers
from lockstep.errors import CheckpointWriteError

if TYPE_CHECKING:
    import io

WRITER = """
import sys, torch
from lockstep import checkpoint

state = {"step": 2, "weight": torch.full((4_000_000,), 2.0)}

def fill(file):
    checkpoint.serialise(state, file)
    file.flush()
    print("written", flush=True)
    sys.stdin.read()

checkpoint.publish(sys.argv[1], fill)
"""

KILLED_AT_ANY_MOMENT = """
import os, signal, sys, torch
from lockstep import checkpoint

path = sys.argv[1]
for turn in range(20):
    reader, notifier = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(2, 100_000):
            checkpoint.write(path, {"step": step, "weight": torch.full((2000,), step)})
            os.write(notifier, b".")
    os.close(notifier)
    for _ in range(turn // 5 + 1):
        assert os.read(reader, 1) == b"."
    for _ in range(turn * 2000):  # another moment each time
        pass
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    os.close(reader)
    state = checkpoint.read(path)
    assert torch.equal(state["weight"], torch.full((2000,), state["step"]))
"""


def python(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    source = Path(lockstep.__path__[0]).parent
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(source)},
    )


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(checkpoint.write(tmp_path / "c.pt", {"step": 1, "weight": torch.ones(1000)}))


def assert_untouched(old: Path) -> None:
    assert checkpoint.read(old)["step"] == 1
    assert [entry.name for entry in old.parent.iterdir()] == [old.name]


def test_a_killed_writer_leaves_the_old_file(old: Path) -> None:
    with python(WRITER, str(old)) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        # The worst moment: everything is written, nothing is published.
        remove_leftovers(str(old.parent))  # as another trainer does, which lets a live writer be
        before = {entry.name for entry in old.parent.iterdir()}
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
    assert checkpoint.read(old)["step"] == 1
    (leftover,) = before - {old.name}
    assert leftover.startswith(".lockstep-")
    # What fills the disk goes before more is written.
    with pytest.raises(ZeroDivisionError):
        checkpoint.publish(old, lambda file: 1 / 0)
    assert_untouched(old)
    assert checkpoint.write(old, {"step": 3}) == str(old)
    assert checkpoint.read(old) == {"step": 3}


@pytest.mark.slow
def test_a_killed_writer_at_any_moment_leaves_a_whole_file(old: Path) -> None:
    # In its own process, since this one has threads, and a fork with threads is no clean start.
    with python(KILLED_AT_ANY_MOMENT, str(old)) as writers:
        assert writers.wait() == 0


def test_a_limit_on_file_size_is_a_clear_oserror(old: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointWriteError) as caught:
            checkpoint.write(old, {"step": 2, "weight": torch.randn(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.EFBIG
    assert str(old) in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.errno) == (
        CheckpointWriteError,
        str(caught.value),
        errno.EFBIG,
    )
    assert_untouched(old)


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_full_disk_comes_out_of_torch_as_an_oserror(size: int) -> None:
    with (
        pytest.raises(OSError, match="No space left") as caught,
        open("/dev/full", "r+b", buffering=0) as full,
    ):
        checkpoint.serialise({"weight": torch.randn(size)}, full)
    assert caught.value.errno == errno.ENOSPC


def test_a_full_disk_names_the_path_and_the_cause(old: Path) -> None:
    def fill(_: object) -> None:
        with open("/dev/full", "r+b", buffering=0) as full:
            checkpoint.serialise({"weight": torch.randn(10)}, full)

    with pytest.raises(CheckpointWriteError, match="the disk is full") as caught:
        checkpoint.publish(old, fill)
    assert caught.value.errno == errno.ENOSPC
    assert str(old) in str(caught.value)
    assert_untouched(old)


def test_a_disk_that_fails_while_more_is_written(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says so once: a later call, which then succeeds, must not hide it."""
    real, answers = os.fsync, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def fsync(descriptor: int) -> None:
        if answers:
            raise answers.pop()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointWriteError) as caught:
        checkpoint.write(old, {"step": 2, "weight": torch.zeros(20_000_000)})
    assert caught.value.errno == errno.EIO
    assert_untouched(old)


@pytest.mark.parametrize(("number", "is_fault"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_a_folder_that_cannot_be_flushed(
    old: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_fault: bool
) -> None:
    """Some network file systems have no such call; whatever else fails may lose the name."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if is_fault:
        with pytest.raises(CheckpointWriteError) as caught:
            checkpoint.write(old, {"step": 2})
        assert caught.value.errno == number
        assert "the new one is there" in str(caught.value)
        assert "untouched" not in str(caught.value)
    else:
        checkpoint.write(old, {"step": 2})
        assert checkpoint.read(old) == {"step": 2}


def test_folders_that_cannot_be_written_to(old: Path) -> None:
    cases = {
        old / "below a file" / "c.pt": "a file, not a folder",
        old / "c.pt": "a file, not a folder",
        Path("/proc/lockstep/c.pt"): "could not be written",
        old.parent: "is a directory",
        old.parent / ("n" * 300): "too long",
    }
    for path, words in cases.items():
        with pytest.raises(CheckpointWriteError, match=words) as caught:
            checkpoint.write(path, {"step": 2})
        assert str(path) in str(caught.value)
    assert_untouched(old)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_whatever_ends_the_writing_cleans_up(old: Path, error: type[BaseException]) -> None:
    def fill(file: io.BufferedIOBase) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(error):
        checkpoint.publish(old, fill)
    assert_untouched(old)


def test_a_link_is_written_through(old: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest.pt"
    link.symlink_to(old.name)
    assert checkpoint.write(link, {"step": 2}) == str(link)
    assert link.is_symlink()
    assert checkpoint.read(old) == {"step": 2}


def test_permissions_are_the_usual_ones_or_those_of_the_old_file(old: Path) -> None:
    reference = old.parent / "reference"
    reference.touch()
    assert stat.S_IMODE(old.stat().st_mode) == stat.S_IMODE(reference.stat().st_mode)
    old.chmod(0o640)
    checkpoint.write(old, {"step": 2})
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint.write("c.pt", {"step": 2}) == "c.pt"
    assert checkpoint.read("c.pt") == {"step": 2}


def test_writers_at_the_same_time_do_not_mix(old: Path) -> None:
    def write(step: int) -> None:
        for _ in range(5):
            checkpoint.write(old, {"step": step, "weight": torch.full((5000,), step)})

    threads = [threading.Thread(target=write, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = checkpoint.read(old)
    assert torch.equal(state["weight"], torch.full((5000,), state["step"]))
    assert [entry.name for entry in old.parent.iterdir()] == [old.name]


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """Nor a device, as /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointWriteError, match="not a regular file"):
        checkpoint.publish(pipe, lambda file: file.write(b"content"))
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]
