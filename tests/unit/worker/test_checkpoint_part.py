# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a checkpoint waits until the driver asks for it, and leaves nothing behind."""

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lockstep import checkpoint
from lockstep.checkpoint import finish_directory, publish_directory
from lockstep.data_parallel_mesh import DataParallelMesh
from lockstep.local_rows import LocalRows
from lockstep.worker import checkpoint_part
from lockstep.worker.checkpoint_part import CheckpointPart

SHAPE = torch.Size([4, 3])


class Trained:
    """As much of a worker as a part is taken from; each step changes its rows in place."""

    def __init__(self):
        self.rank, self.step = 0, 0
        self.mesh = DataParallelMesh(0, 1)
        self.per_rank_keys = ()
        self.rows = torch.zeros(4, 3)

    def own_state_dict(self, copy):
        rows = LocalRows(copy(self.rows), SHAPE, 0)
        return {"global_step": self.step, "rows": rows, "operator": None}

    def train(self):
        self.step += 1
        self.rows.fill_(self.step)


@pytest.fixture
def worker():
    return Trained()


@pytest.fixture
def part(worker):
    return CheckpointPart(worker)


def written(part, step, path):
    with publish_directory(path) as folder:
        on_disk = part.write(step, folder)
        finish_directory(folder, [on_disk.part], on_disk.part.state)
    return checkpoint.read(path)["rows"]


def test_training_goes_on_and_the_copy_stays(worker, part, tmp_path):
    worker.train()
    part.copy()
    worker.train()
    assert written(part, 1, tmp_path / "state").unique().tolist() == [1.0]


def test_one_that_is_asked_for_late_is_still_there(worker, part, tmp_path):
    for _ in range(3):
        worker.train()
        part.copy()
    folder = str(tmp_path)
    # Of three the last two are kept, and an older one is not waited for.
    assert part.write(1, folder) is None
    assert written(part, 2, tmp_path / "two").unique().tolist() == [2.0]
    assert written(part, 3, tmp_path / "three").unique().tolist() == [3.0]


def test_memory_is_used_again_and_never_that_of_a_copy_that_waits(worker, part, tmp_path):
    for step in range(1, 6):
        worker.train()
        part.copy()
        if step > 1:
            assert written(part, step - 1, tmp_path / str(step)).unique().tolist() == [step - 1]
    assert worker.rows.unique().tolist() == [5.0]


def test_after_a_load_nothing_of_before_is_written(worker, part, tmp_path):
    worker.train()
    part.copy()
    part.drop()
    worker.step, worker.rows = 0, torch.full((4, 3), 7.0)
    worker.step = 1  # the same number, in another run
    part.copy()
    assert written(part, 1, tmp_path / "state").unique().tolist() == [7.0]


def test_what_is_held_between_calls_is_not_copied_and_stays_the_workers(worker, part, tmp_path):
    worker.train()
    part.hold()
    assert written(part, 1, tmp_path / "state").unique().tolist() == [1.0]
    worker.train()
    part.copy()  # into memory of its own, and not into the live rows
    worker.train()
    assert written(part, 2, tmp_path / "later").unique().tolist() == [2.0]


def open_files():
    """How many files below `lockstep`'s temporary folders are open; others come and go."""
    held = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            held.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(path.startswith(os.path.join(tempfile.gettempdir(), ".lockstep-")) for path in held)


def test_where_the_folder_is_not_there_the_driver_reads_the_file_by_pieces(worker, part, tmp_path):
    before = open_files()
    for fetch in (False, True):  # a part that nobody fetches goes with the next one
        worker.train()
        part.copy()
        on_disk = part.write(worker.step, str(tmp_path / "elsewhere"))
        ((name, size),) = on_disk.sizes.items()
        assert open_files() == before + 1
        if fetch:
            pieces = [part.read(name, offset, 100) for offset in range(0, size + 1, 100)]
            assert sum(map(len, pieces)) == size
    assert open_files() == before
    (tmp_path / name).write_bytes(b"".join(pieces))
    finish_directory(str(tmp_path), [on_disk.part], on_disk.part.state)
    assert checkpoint.read(tmp_path)["rows"].unique().tolist() == [2.0]


@pytest.fixture
def shard():
    """All rows of a tensor, as the one rank of a mesh has them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    yield DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)])
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_ranks_of_the_first_copy_of_the_models_write_its_rows(tmp_path, worker, shard, rank):
    worker.mesh, worker.rank = DataParallelMesh(rank, 2, 1), rank
    worker.own_state_dict = lambda copy: {"global_step": 1, **copy({"rows": shard})}
    part = CheckpointPart(worker)
    written = part.write(part.copy(), str(tmp_path))
    assert written is not None
    assert written.part.in_rows  # each knows of the tensor
    assert bool(written.part.files) == (rank == 0)


def test_two_copies_of_one_step_are_written_one_each(worker, part, tmp_path):
    """A checkpoint that is due waits for the disk, and a callback saves the same step."""
    worker.train()
    part.copy()
    part.hold()
    for name in ("saved", "due"):
        assert written(part, 1, tmp_path / name).unique().tolist() == [1.0]


def test_what_a_killed_worker_has_left_in_the_temporary_folder_goes_with_the_next_part(
    worker, part, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda path: None)
        part.copy()
        part.write(0, str(tmp_path / "elsewhere"))
    (left,) = tmp_path.iterdir()
    assert any(left.iterdir())
    part.copy()
    part.write(0, str(tmp_path / "elsewhere"))
    assert os.listdir(tmp_path) == []


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_a_copy_is_waited_for_as_long_as_it_may_come(worker, part, thread, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_part, "_ARRIVAL_S", 0.01, raising=False)
    with part.during_training():
        writing = thread.submit(part.write, 1, str(tmp_path))
        with pytest.raises(TimeoutError):
            writing.result(0.2)
        worker.train()
        part.copy()
        assert writing.result().part.state["global_step"] == 1


@pytest.mark.parametrize("how", ["call ends", "drop"])
def test_a_copy_that_will_not_come_is_not_waited_for(part, thread, tmp_path, how):
    with part.during_training():
        writing = thread.submit(part.write, 1, str(tmp_path))
        if how == "drop":
            while not writing.done():  # it may not have begun before
                part.drop()
    assert writing.result() is None
    assert part.write(1, str(tmp_path)) is None
