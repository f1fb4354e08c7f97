# SPDX-License-Identifier: Apache-2.0
"""Ranks write a checkpoint directory in parts, and any number of ranks reads its rows of it."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as distributed

from lockstep import checkpoint
from lockstep.errors import CheckpointError
from lockstep.local_rows import LocalRows, first_row, rows_of
from lockstep.tensor_tree import leaves_of, tree_map

WHOLE = {
    "models": [{"even": torch.arange(24.0).view(12, 2), "uneven": torch.arange(7.0)}],
    "optimizers": [{0: {"few": torch.arange(2.0), "step": torch.tensor(3.0)}}],
    "buffer": torch.arange(4),
    "global_step": 7,
}
SHARED_OUT = ("even", "uneven", "few")


def cut(rank, size):
    """The state that `rank` of `size` ranks has."""

    def rows(tensor):
        first = first_row(len(tensor), rank, size)
        return LocalRows(rows_of(tensor, rank, size).clone(), tensor.shape, first)

    model, optimizer = WHOLE["models"][0], WHOLE["optimizers"][0][0]
    return {
        **WHOLE,
        "models": [{name: rows(tensor) for name, tensor in model.items()}],
        "optimizers": [{0: {"few": rows(optimizer["few"]), "step": optimizer["step"]}}],
        "operator": {"rank": rank, "own": torch.full((rank + 1,), float(rank))},
    }


def written(path, size):
    with checkpoint.publish_directory(path) as folder:
        parts = [
            checkpoint.write_part(folder, cut(rank, size), rank, ("operator",))
            for rank in range(size)
        ]
        by_rank = [part.state["operator"] for part in parts]
        state = {**parts[0].state, "operator_by_rank": by_rank}
        checkpoint.finish_directory(folder, parts, state)
    return path


def is_same(one, other):
    pairs = zip(leaves_of(one), leaves_of(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("size", range(1, 6))
def test_one_process_reads_what_any_number_of_ranks_wrote(tmp_path, size):
    state = checkpoint.read(written(tmp_path / "state", size))
    assert is_same({key: state[key] for key in WHOLE}, WHOLE)
    assert [own["rank"] for own in state["operator_by_rank"]] == list(range(size))
    for rank, own in enumerate(state["operator_by_rank"]):
        assert torch.equal(own["own"], torch.full((rank + 1,), float(rank)))


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("readers", range(2, 6))
def test_each_rank_reads_its_rows(tmp_path, size, readers):
    path = written(tmp_path / "state", size)
    for rank in range(readers):
        opened = checkpoint.open_checkpoint(path)
        assert not any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(opened))
        state = checkpoint.read_own_tensors(opened, rank, readers)
        held = {**state["models"][0], "few": state["optimizers"][0][0]["few"]}
        for name in SHARED_OUT:
            whole = WHOLE["models"][0].get(name, WHOLE["optimizers"][0][0].get(name))
            rows = held[name]
            assert (rows.shape, rows.first) == (whole.shape, first_row(len(whole), rank, readers))
            assert torch.equal(rows.rows, rows_of(whole, rank, readers))
        assert torch.equal(state["buffer"], WHOLE["buffer"])


def test_a_rank_writes_its_rows_and_rank_0_what_is_whole(tmp_path):
    big = torch.zeros(4, 10_000)
    path = tmp_path / "state"
    with checkpoint.publish_directory(path) as folder:
        parts = []
        for rank in range(4):
            rows = LocalRows(rows_of(big, rank, 4).clone(), big.shape, rank)
            state = {"rows": rows, "whole": torch.zeros(10_000)}
            parts.append(checkpoint.write_part(folder, state, rank))
        checkpoint.finish_directory(folder, parts, parts[0].state)
    sizes = [os.path.getsize(path / f"__{rank}_0.distcp") for rank in range(4)]
    assert all(40_000 < size < 43_000 for size in sizes[1:])
    assert 80_000 < sizes[0] < 85_000


def test_torch_alone_reads_it(tmp_path):
    path = written(tmp_path / "state", 3)
    names = distributed.FileSystemReader(path).read_metadata().state_dict_metadata
    (name,) = [name for name in names if re.fullmatch(r"\d+\.models\.0\.uneven", name)]
    found = {name: torch.zeros(7)}
    with pytest.warns(UserWarning, match="single process"):
        distributed.load(found, checkpoint_id=path, no_dist=True)
    assert torch.equal(found[name], WHOLE["models"][0]["uneven"])


def test_what_a_rank_wrote_for_nothing_is_not_kept(tmp_path):
    path = tmp_path / "state"
    with checkpoint.publish_directory(path) as folder:
        checkpoint.write_part(folder, cut(2, 3), 2, ("operator",))  # then it died
        parts = [checkpoint.write_part(folder, cut(r, 2), r, ("operator",)) for r in range(2)]
        checkpoint.finish_directory(folder, parts, parts[0].state)
    assert sorted(os.listdir(path)) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "lockstep.ckpt",
    ]
    assert is_same({key: checkpoint.read(path)[key] for key in WHOLE}, WHOLE)


def test_cut_off_while_parts_are_written_the_one_before_is_whole(tmp_path):
    path = written(tmp_path / "state", 2)
    with pytest.raises(KeyboardInterrupt), checkpoint.publish_directory(path) as folder:
        checkpoint.write_part(folder, cut(0, 2), 0)
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["state"]
    assert checkpoint.read(path)["global_step"] == 7


def test_a_rank_verifies_the_files_that_it_reads(tmp_path):
    path = written(tmp_path / "state", 2)
    opened = checkpoint.open_checkpoint(path)
    file = path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.open_checkpoint(path)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read_own_tensors(opened, 1, 2)


@pytest.mark.parametrize("becomes", ["another", "none"])
def test_a_directory_that_is_replaced_while_it_is_read_is_refused(tmp_path, monkeypatch, becomes):
    """By one of another step: its files have the same names and sizes."""
    path, real = tmp_path / "latest", distributed.FileSystemReader.read_data
    checkpoint.write_directory(path, {"weight": torch.zeros(3)})

    def read_data(*arguments):
        if becomes == "another":
            checkpoint.write_directory(path, {"weight": torch.ones(3)})
        else:
            path.rename(tmp_path / "elsewhere")
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(distributed.FileSystemReader, "read_data", read_data)
        with pytest.raises(CheckpointError, match="saved anew while it was read"):
            checkpoint.read(path)
    if becomes == "another":
        assert checkpoint.read(path)["weight"].tolist() == [1.0] * 3


def test_parts_that_do_not_make_a_whole_are_no_checkpoint(tmp_path):
    with (
        pytest.raises(CheckpointError, match="not written the whole"),
        checkpoint.publish_directory(tmp_path / "state") as folder,
    ):
        parts = [checkpoint.write_part(folder, cut(rank, 3), rank) for rank in range(2)]
        checkpoint.finish_directory(folder, parts, parts[0].state)
    assert os.listdir(tmp_path) == []


def test_a_state_of_two_directories_has_the_values_of_each(tmp_path):
    checkpoint.write_directory(tmp_path / "one", {"weight": torch.ones(3)})
    checkpoint.write_directory(tmp_path / "two", {"weight": torch.full((3,), 2.0)})
    both = {name: checkpoint.open_checkpoint(tmp_path / name) for name in ("one", "two")}
    state = checkpoint.read_own_tensors(both)
    assert state["one"]["weight"].tolist() == [1.0] * 3
    assert state["two"]["weight"].tolist() == [2.0] * 3


def test_a_host_sees_the_directory_or_another_one_in_its_place(tmp_path):
    path = written(tmp_path / "state", 2)
    stored = next(
        leaf
        for leaf in leaves_of(checkpoint.open_checkpoint(path))
        if isinstance(leaf, checkpoint.StoredTensor)
    )
    assert checkpoint.is_here(stored)
    path.rename(tmp_path / "elsewhere")
    assert not checkpoint.is_here(stored)
    other = tree_map(lambda leaf: leaf, WHOLE)
    checkpoint.write_directory(path, {**other, "more": torch.zeros(1)})
    assert not checkpoint.is_here(stored)


KILLED_AT_ANY_MOMENT = """
import os, signal, sys, torch
from lockstep import checkpoint
from lockstep.checkpoint import dcp_tensors
from lockstep.checkpoint.rotation import Rotation
from lockstep.local_rows import LocalRows

SHAPE = torch.Size([2, 2000])

def write(path, step):
    with checkpoint.publish_directory(path) as folder:
        parts = [
            checkpoint.write_part(
                folder,
                {"step": step, "weight": LocalRows(torch.full((1, 2000), step), SHAPE, rank)},
                rank,
            )
            for rank in range(2)
        ]
        checkpoint.finish_directory(folder, parts, parts[0].state)
    return path

for turn in range(20):
    kept = Rotation(sys.argv[1], 2, checkpoint.read)
    kept.prepare_folder()
    kept.remove_leftovers()
    first = kept.steps()[-1] + 1 if kept.steps() else 1
    kept.resume_from(kept.path_of(first - 1))
    reader, notifier = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(first, 100_000):
            kept.write(step, lambda path: write(path, step))
            os.write(notifier, b".")
    os.close(notifier)
    for _ in range(turn // 5 + 1):
        assert os.read(reader, 1) == b"."
    for _ in range(turn * 5000):  # another moment each time
        pass
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    os.close(reader)
    path, state = kept.read_newest()
    assert state["step"] >= first + turn // 5, (state["step"], first)
    assert path == kept.path_of(kept.steps()[-1])
    assert torch.equal(state["weight"], torch.full((2, 2000), state["step"]))
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_newest_directory_is_whole(tmp_path):
    # In its own process, since this one has threads, and a fork with threads is no clean start.
    subprocess.run([sys.executable, "-c", KILLED_AT_ANY_MOMENT, str(tmp_path)], check=True)
