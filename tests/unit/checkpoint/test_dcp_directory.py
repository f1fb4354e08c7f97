# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory exists whole or not at all, is verified, and is read without code."""

import errno
import hashlib
import os
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as distributed
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lockstep import checkpoint
from lockstep.checkpoint.dcp_directory import INDEX
from lockstep.errors import CheckpointError, CheckpointWriteError

STATE = {
    "models": [OrderedDict(weight=torch.arange(6.0).reshape(2, 3), bias=torch.zeros(2))],
    "optimizers": [{"state": {0: {"step": torch.tensor(3.0), "old": (torch.ones(1), "x")}}}],
    "epoch": 2,
    "nothing": None,
    1: {"1": torch.tensor([True, False]), 1: torch.ones(0, dtype=torch.bfloat16)},
}


def test_comes_back_as_it_was_and_replaces_an_earlier_one(tmp_path):
    path = tmp_path / "deep" / "state"
    assert checkpoint.write_directory(path, {"epoch": 1}) == str(path)
    assert checkpoint.read(path) == {"epoch": 1}
    checkpoint.write_directory(path, STATE)
    back = checkpoint.read(path)
    assert back.keys() == STATE.keys()
    assert type(back["models"][0]) is OrderedDict
    assert torch.equal(back["models"][0]["weight"], STATE["models"][0]["weight"])
    assert back["optimizers"][0]["state"][0]["step"].item() == 3.0
    assert back["optimizers"][0]["state"][0]["old"][1] == "x"
    assert torch.equal(back[1]["1"], STATE[1]["1"])
    assert back[1][1].dtype is torch.bfloat16
    assert os.listdir(path.parent) == ["state"]


def test_the_tensors_are_a_distributed_checkpoint_of_torch(tmp_path):
    path = checkpoint.write_directory(tmp_path / "state", STATE)
    names = distributed.FileSystemReader(path).read_metadata().state_dict_metadata
    (weight,) = [name for name in names if name.endswith("models.0.weight")]
    found = {weight: torch.zeros(2, 3)}
    with pytest.warns(UserWarning, match="single process"):
        distributed.load(found, checkpoint_id=path, no_dist=True)
    assert torch.equal(found[weight], STATE["models"][0]["weight"])


@pytest.mark.parametrize("how", ["changed", "missing"])
def test_every_file_is_verified(tmp_path, how):
    path = tmp_path / "state"
    checkpoint.write_directory(path, STATE)
    for name in sorted(os.listdir(path)):
        content = (path / name).read_bytes()
        if how == "changed":
            (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        else:
            (path / name).unlink()
        with pytest.raises(CheckpointError):
            checkpoint.read(path)
        (path / name).write_bytes(content)
    assert checkpoint.read(path)["epoch"] == 2


class Runs:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def through_an_import(target):
    """A pickle that calls what a harmless module has imported, by a name with a dot."""

    def text(value):
        return b"\x8c" + bytes([len(value)]) + value.encode()

    function = text("torch.distributed.checkpoint.metadata") + text("os.mkdir") + b"\x93"
    return b"\x80\x04" + function + text(str(target)) + b"\x85R."


def with_checksums(path):
    """Whoever alters a directory on purpose makes them right."""
    index = checkpoint.read(path / INDEX)
    files = set(os.listdir(path)) - {INDEX}
    index["files"] = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in files
    }
    checkpoint.write(path / INDEX, index)


def altered(path, change):
    """The directory with another metadata of torch."""
    metadata = distributed.FileSystemReader(path).read_metadata()
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with_checksums(path)


def bytes_that_torch_unpickles(path, target):
    """An entry whose metadata says that it holds an object, and not a tensor."""
    attack = pickle.dumps(Runs(target))
    (path / "__0_0.distcp").write_bytes(attack)

    def change(metadata):
        for name in metadata.state_dict_metadata:
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(name)] = _StorageInfo(
                "__0_0.distcp", 0, len(attack)
            )

    altered(path, change)


ATTACKS = {
    "a function": lambda path, target: (path / ".metadata").write_bytes(pickle.dumps(Runs(target))),
    "a module's import": lambda path, target: (path / ".metadata").write_bytes(
        through_an_import(target)
    ),
    "bytes": bytes_that_torch_unpickles,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_directory_that_would_run_code_does_not(tmp_path, attack):
    path, target = tmp_path / "state", tmp_path / "it-ran"
    checkpoint.write_directory(path, STATE)
    ATTACKS[attack](path, target)
    with_checksums(path)
    with pytest.raises(CheckpointError, match="it was not run"):
        checkpoint.read(path)
    assert not target.exists()


def test_a_file_outside_is_not_read(tmp_path):
    path = tmp_path / "state"
    checkpoint.write_directory(path, STATE)
    (path / "__0_0.distcp").rename(tmp_path / "elsewhere")

    def change(metadata):
        for entry in metadata.storage_data.values():
            entry.relative_path = "../elsewhere"

    altered(path, change)
    with pytest.raises(CheckpointError, match="no file of this checkpoint"):
        checkpoint.read(path)


def test_an_entry_that_is_no_tensor_is_not_read(tmp_path):
    path = tmp_path / "state"
    checkpoint.write_directory(path, STATE)

    def change(metadata):
        for name in metadata.state_dict_metadata:
            metadata.state_dict_metadata[name] = OrderedDict()

    altered(path, change)
    with pytest.raises(CheckpointError, match="only code could rebuild"):
        checkpoint.read(path)


def test_a_new_directory_that_cannot_take_its_name_leaves_the_old_one(tmp_path, monkeypatch):
    path = checkpoint.write_directory(tmp_path / "state", {"epoch": 1})
    real = os.rename

    def rename(source, target):
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointWriteError):
        checkpoint.write_directory(path, {"epoch": 2})
    assert checkpoint.read(path) == {"epoch": 1}
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("number", [None, errno.EINVAL, errno.EIO])
def test_the_new_name_is_on_the_disk_before_the_old_directory_goes(tmp_path, monkeypatch, number):
    """Some network file systems cannot flush a folder (EINVAL); any other error may lose it."""
    path, real, seen = tmp_path / "state", os.fsync, []
    checkpoint.write_directory(path, {"epoch": 1})

    def fsync(descriptor):
        if os.path.samestat(os.fstat(descriptor), os.stat(tmp_path)):
            seen.append((checkpoint.read(path), len(os.listdir(tmp_path))))
            if number is not None:
                raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:
        with pytest.raises(CheckpointWriteError, match="the new one is there"):
            checkpoint.write_directory(path, {"epoch": 2})
    else:
        checkpoint.write_directory(path, {"epoch": 2})
    assert seen == [({"epoch": 2}, 2)]
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("has_links", [True, False])
def test_what_a_user_put_into_a_directory_stays_when_it_is_saved_anew(
    tmp_path, monkeypatch, has_links
):
    def link(*_, **__):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    path = tmp_path / "state"
    checkpoint.write_directory(path, STATE)
    (path / "tokenizer.json").write_text("mine")
    (path / "latest").symlink_to("tokenizer.json")
    (path / "onnx" / "deep").mkdir(parents=True)
    (path / "onnx" / "deep" / "__0_0.distcp").write_text("mine, too")
    if not has_links:
        monkeypatch.setattr(os, "link", link)
    for epoch in (1, 2):
        checkpoint.write_directory(path, {"epoch": epoch})
        assert checkpoint.read(path) == {"epoch": epoch}
        names = ["latest", "lockstep.ckpt", "onnx", "tokenizer.json"]
        assert sorted(os.listdir(path)) == names
        assert (path / "tokenizer.json").read_text() == "mine"
        assert os.readlink(path / "latest") == "tokenizer.json"
        assert (path / "onnx" / "deep" / "__0_0.distcp").read_text() == "mine, too"
    assert os.listdir(tmp_path) == ["state"]


def test_what_is_in_the_way_stays(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    for name in ("file", "folder"):
        with pytest.raises(CheckpointError, match="in the way"):
            checkpoint.write_directory(tmp_path / name, STATE)
    with pytest.raises(CheckpointWriteError):
        checkpoint.write_directory(tmp_path / "file" / "below", STATE)
    with pytest.raises(CheckpointError):
        checkpoint.write_directory(tmp_path / "new", {"bad": object()})
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "folder" / "file").read_text() == "mine"


@pytest.mark.parametrize("is_there", [True, False])
def test_of_a_writer_that_was_killed_nothing_is_left_and_nothing_lost(tmp_path, is_there):
    """Killed while it replaced a directory: the next writer to the folder removes its files."""
    path = tmp_path / "state"
    checkpoint.write_directory(path, {"step": 1})
    aside = tmp_path / f".lockstep-{'0' * 16}.old"
    aside.mkdir()
    path.rename(aside / path.name)
    (tmp_path / f".lockstep-{'1' * 16}.tmp").mkdir()
    if is_there:
        checkpoint.write_directory(path, {"step": 2})
    else:
        checkpoint.write_directory(tmp_path / "another", {"step": 3})
    assert checkpoint.read(path)["step"] == (2 if is_there else 1)
    assert {each.name for each in tmp_path.iterdir()} <= {"state", "another"}


def test_a_directory_that_cannot_take_its_place_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "state"
    checkpoint.write_directory(path, {"step": 1})
    rename = os.rename

    def refuse(source, target):
        if str(target) == str(path) and source.endswith(".tmp"):
            raise OSError(errno.EIO, "no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointWriteError):
        checkpoint.write_directory(path, {"step": 2})
    assert checkpoint.read(path)["step"] == 1
    assert os.listdir(tmp_path) == ["state"]
