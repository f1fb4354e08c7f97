# SPDX-License-Identifier: Apache-2.0
"""Any change to a checkpoint file raises an error that names it, and no file runs code."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import checkpoint
from lockstep.errors import CheckpointError, CheckpointNotFoundError, LockstepError

STATE: dict[str, Any] = {
    "models": [{"weight": torch.arange(600.0).view(20, 30)}],
    "note": "lockstep-checkpoint and PK\x05\x06 in the content confuse nobody",
    "epoch": 3,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = checkpoint.write(tmp_path_factory.mktemp("good") / "c.pt", STATE)
    return Path(path).read_bytes()


def assert_is_state(read: dict[str, Any]) -> None:
    assert torch.equal(read["models"][0]["weight"], STATE["models"][0]["weight"])
    assert {**read, "models": None} == {**STATE, "models": None}


def refusal(path: Path, content: bytes) -> CheckpointError:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, LockstepError)
    return caught.value


def with_mark(torch_bytes: bytes, *, version: int = 1) -> bytes:
    """What a writer of another version, or a forger, would make: the mark's own definition.

    Of a file without large records it is that of version 2, too.
    """
    digest = hashlib.sha256(torch_bytes).hexdigest()
    body = b'lockstep-checkpoint {"sha256":"%s","version":%d} ' % (digest.encode(), version)
    mark = body + b"%08x" % zlib.crc32(body)
    return torch_bytes[:-2] + struct.pack("<H", len(mark)) + mark


def saved_by_torch(path: Path, value: object) -> bytes:
    torch.save(value, path)
    return path.read_bytes()


def test_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "c.pt"
    assert checkpoint.write(path, STATE) == str(path)
    assert_is_state(checkpoint.read(path))


def test_torch_and_zip_read_it_too(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "c.pt"
    path.write_bytes(good)
    for mmap in (False, True):
        assert_is_state(torch.load(path, weights_only=True, mmap=mmap))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_the_mark_is_as_documented(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "c.pt"
    path.write_bytes(good)
    with zipfile.ZipFile(path) as archive:
        length = len(archive.comment)
    assert with_mark(good[: -length - 2] + b"\0\0", version=2) == good


def test_files_of_the_first_version_are_read(tmp_path: Path) -> None:
    state = {"small": torch.ones(3), "large": torch.randn(100_000)}
    path = tmp_path / "c.pt"
    content = with_mark(saved_by_torch(tmp_path / "t.pt", state), version=1)
    path.write_bytes(content)
    assert torch.equal(checkpoint.read(path)["large"], state["large"])
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    assert "checksum" in str(refusal(path, bytes(flipped)))


def test_a_missing_file_is_both_kinds_of_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        checkpoint.read(tmp_path / "none.pt")
    with pytest.raises(CheckpointNotFoundError, match=r"none\.pt"):
        checkpoint.read(tmp_path / "none.pt")
    with pytest.raises(CheckpointError):
        checkpoint.read(tmp_path / "no" / "folder")


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a directory"):
        checkpoint.read(tmp_path)


def test_truncated_anywhere(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "c.pt"
    assert "is empty" in str(refusal(path, b""))
    ends = {1, 3, 4, *range(5, len(good), 61), *range(len(good) - 300, len(good))}
    for end in ends:
        refusal(path, good[:end])
    assert "damaged" in str(refusal(path, good[: len(good) // 2]))
    assert "damaged" in str(refusal(path, good[:-1]))


def test_one_byte_flipped_anywhere(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "c.pt"
    draw = random.Random(0)
    tail = range(len(good) - 200, len(good))
    for position in {*draw.sample(range(len(good)), 300), 0, 1, 2, 3, *tail}:
        flipped = bytearray(good)
        flipped[position] ^= draw.randrange(1, 256)
        refusal(path, bytes(flipped))


@pytest.mark.parametrize("where", ["front", "middle", "end"])
def test_bytes_added_or_taken(tmp_path: Path, good: bytes, where: str) -> None:
    at = {"front": 0, "middle": len(good) // 2, "end": len(good)}[where]
    refusal(tmp_path / "c.pt", good[:at] + b"\0" + good[at:])
    refusal(tmp_path / "c.pt", good[:at] + good + good[at:])
    if where != "end":
        refusal(tmp_path / "c.pt", good[:at] + good[at + 1 :])


def test_a_newer_version_says_upgrade(tmp_path: Path, good: bytes) -> None:
    newer = with_mark(saved_by_torch(tmp_path / "t.pt", {"later": "layout"}), version=7)
    message = str(refusal(tmp_path / "c.pt", newer))
    assert "written by format 7, this lockstep reads up to 2: upgrade" in message


@pytest.mark.parametrize("value", [{"weight": torch.ones(2)}, torch.ones(2)])
def test_a_foreign_torch_file(tmp_path: Path, value: object) -> None:
    content = saved_by_torch(tmp_path / "t.pt", value)
    assert "without lockstep's mark" in str(refusal(tmp_path / "c.pt", content))


@pytest.mark.parametrize(
    "content",
    [b"x", b"epoch: 3\n" * 1000, bytes(5000), b"\x80\x02}q\x00.", pickle.dumps({"epoch": 3})],
)
def test_a_foreign_file(tmp_path: Path, content: bytes) -> None:
    assert "not a checkpoint" in str(refusal(tmp_path / "c.pt", content))


def test_a_device_without_content() -> None:
    with pytest.raises(CheckpointError, match="is empty"):
        checkpoint.read(os.devnull)


class _Attack:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The variable makes a plain `torch.load(path)` run code; ours must not listen to it.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    target = tmp_path / "owned"
    attack = saved_by_torch(tmp_path / "t.pt", {"epoch": _Attack(target)})
    assert "without lockstep's mark" in str(refusal(tmp_path / "c.pt", attack))
    assert "only code could rebuild" in str(refusal(tmp_path / "c.pt", with_mark(attack)))
    refusal(tmp_path / "c.pt", pickle.dumps(_Attack(target)))
    assert not target.exists()


@pytest.mark.parametrize("value", [[1, 2], torch.ones(1)])
def test_marked_but_no_dict(tmp_path: Path, value: object) -> None:
    content = with_mark(saved_by_torch(tmp_path / "t.pt", value))
    assert "a dict" in str(refusal(tmp_path / "c.pt", content))


def test_marked_but_not_torch(tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("hello.txt", "hello")
    assert "torch cannot read" in str(refusal(tmp_path / "c.pt", with_mark(archive.read_bytes())))


def test_the_whole_file_at_a_size_of_many_chunks(tmp_path: Path) -> None:
    """Large records and small ones, the headers between them, and the directory behind them."""
    names = ("a", "b", "c", "d")
    state = {name: torch.randn(200_000, dtype=torch.float64) for name in names}
    state |= {name * 2: torch.randn(50) for name in names}
    path = Path(checkpoint.write(tmp_path / "c.pt", state))
    assert all(map(torch.equal, checkpoint.read(path).values(), state.values()))
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        headers = [entry.header_offset for entry in archive.infolist()]
    draw = random.Random(0)
    places = {*draw.sample(range(len(content)), 40), (1 << 20) - 1, 1 << 20, 5_000_001}
    places |= {header + draw.randrange(200) for header in headers}
    places |= set(draw.sample(range(len(content) - 1200, len(content)), 100))
    for position in places:
        content[position] ^= (change := draw.randrange(1, 256))
        assert "damaged" in str(refusal(path, bytes(content)))
        content[position] ^= change
    page = slice(1 << 20, (1 << 20) + 4096)
    content[page] = bytes(4096)
    assert "the checksum of" in str(refusal(path, bytes(content)))


def test_a_process_that_tells_torch_to_write_no_checksums(tmp_path: Path) -> None:
    state = {"large": torch.randn(100_000)}
    torch.serialization.set_crc32_options(False)
    try:
        path = checkpoint.write(tmp_path / "c.pt", state)
        assert torch.equal(checkpoint.read(path)["large"], state["large"])
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
