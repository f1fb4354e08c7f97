# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a directory: whole or not there, verified, read without running code."""

import os
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as distributed

from lockstep import checkpoint
from lockstep.checkpoint.directory import INDEX
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
    def __reduce__(self):
        return os.mkdir, ("it-ran",)


def test_an_index_that_would_run_code_does_not(tmp_path):
    path = tmp_path / "state"
    checkpoint.write_directory(path, STATE)
    (path / ".metadata").write_bytes(pickle.dumps(Runs()))
    index = checkpoint.read(path / INDEX)
    index["files"] = {}
    checkpoint.write(path / INDEX, index)
    before = os.listdir()
    with pytest.raises(CheckpointError, match="it was not run"):
        checkpoint.read(path)
    assert os.listdir() == before


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
