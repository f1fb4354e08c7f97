# SPDX-License-Identifier: Apache-2.0
"""A worker is stopped (a signal, a debugger) when training is over and the driver saves."""

import os
import signal

import pytest
from tests.ray.surviving import Classifier
from tests.ray.surviving import trainer_of as whole
from tests.ray.surviving_in_shards import InShards
from tests.ray.surviving_in_shards import trainer_of as in_shards
from tests.ray.test_death_in_recovery import is_first

from lockstep.errors import CheckpointWriteError
from lockstep.keys import BATCH_SIZE
from lockstep.worker import checkpoint_part, checkpoint_snapshot, loop_run

# Setups here replace functions of lockstep's in their processes.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("workers_end_with_their_trainer"),
]

STEPS, HANG_S = 4, 2


class StopsAsItWrites(InShards):
    """Rank 1 is stopped as it writes its part of the last checkpoint of the call."""

    def setup(self, config):
        super().setup(config)
        write = checkpoint_part.CheckpointPart.write

        def stop_and_write(part, step, folder):
            if self.world_rank == 1 and step == STEPS and is_first(config["mark"]):
                os.kill(os.getpid(), signal.SIGSTOP)
            return write(part, step, folder)

        checkpoint_part.CheckpointPart.write = stop_and_write


def test_a_worker_that_is_stopped_as_it_writes_is_ended(tmp_path):
    arguments = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 2}
    config = {"mark": str(tmp_path / "mark")}
    with in_shards(
        StopsAsItWrites, num_workers=2, hang_timeout_s=HANG_S, config=config, **arguments
    ) as trainer:
        with pytest.raises(CheckpointWriteError, match="a worker died while it wrote"):
            trainer.train(num_steps=STEPS)
        trainer.train(num_steps=2)
        status = trainer.status()
    assert status["step"] == STEPS + 2
    assert "stopped" in status["recoveries"][0]["why"]


class StopsWhenAsked(Classifier):
    """Rank 0 is stopped when the driver asks it for the last copy, behind the call."""

    def setup(self, config):
        super().setup(config)
        pop, report, is_over = (
            checkpoint_snapshot.SnapshotTaker.pop_latest,
            loop_run.LoopRun.report,
            [],
        )

        def report_and_note(run):
            made = report(run)
            is_over.append(True)
            return made

        def stop_and_pop(snapshots):
            if is_over and self.world_rank == 0 and is_first(config["mark"]):
                os.kill(os.getpid(), signal.SIGSTOP)
            return pop(snapshots)

        loop_run.LoopRun.report = report_and_note
        checkpoint_snapshot.SnapshotTaker.pop_latest = stop_and_pop


def test_a_worker_that_is_stopped_when_its_copy_is_fetched_is_ended(tmp_path):
    arguments = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 2}
    config = {"mark": str(tmp_path / "mark"), BATCH_SIZE: 16}
    with whole(
        StopsWhenAsked, num_workers=2, hang_timeout_s=HANG_S, config=config, **arguments
    ) as trainer:
        trainer.train(num_steps=STEPS)
        trainer.train(num_steps=2)
        status = trainer.status()
    assert status["step"] == STEPS + 2
    assert "stopped" in status["recoveries"][0]["why"]
