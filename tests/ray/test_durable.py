# SPDX-License-Identifier: Apache-2.0
"""Several workers: checkpoints while they train, and runs that go on at another size."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.ray.operators import DefaultLoop, farthest
from tests.ray.surviving import Classifier, OwnEpoch, TwoPlayers, Windows, digest, trainer_of
from tests.ray.surviving_in_shards import InShards

import ray
from lockstep import checkpoint
from lockstep.errors import CheckpointError
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike

STEPS, STOP = 20, 11
SAME_BITS = {"num_shards": 4, "reproducible": True}


def steps_in(folder):
    return [int(path.stem.removeprefix("step-")) for path in sorted(Path(folder).glob("step-*"))]


def run_through(operator_cls=Classifier, **arguments):
    with trainer_of(operator_cls, **arguments) as trainer:
        trainer.train(num_steps=STEPS)
        return digest(trainer)


def go_on(folder, operator_cls=Classifier, steps=STEPS, strikes=(), **arguments):
    """Train until the run has made `steps`; the step from which it went on, and the bits."""
    arguments = {"checkpoint_dir": folder, "checkpoint_every": 5, "resume": "auto"} | arguments
    with trainer_of(operator_cls, strikes, **arguments) as trainer:
        began = trainer.status()["step"]
        trainer.train(num_steps=steps - began)
        return began, digest(trainer)


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_it_goes_on_at_other_numbers_of_workers_with_the_same_bits(tmp_path, size):
    """From the middle of an epoch, twice; `num_shards` comes from the file."""
    expected = run_through(**SAME_BITS)
    assert go_on(tmp_path, steps=STOP, **SAME_BITS)[0] == 0
    assert go_on(tmp_path, steps=16, num_workers=1, reproducible=True)[0] == 10
    began, got = go_on(tmp_path, num_workers=size, reproducible=True, checkpoint_every=50)
    assert (began, got) == (15, expected)


@pytest.mark.slow
def test_a_worker_dies_and_then_the_driver_stops(tmp_path):
    """Rank 0, which copies the state, as well; its spare copies it from then on."""
    expected = run_through()
    strikes = [Strike("kill", rank=0, step=7, phase="buckets")]
    assert go_on(tmp_path, steps=STOP, strikes=strikes, spare_workers=1)[0] == 0
    assert steps_in(tmp_path)[-1] == 10
    assert go_on(tmp_path) == (10, expected)


@pytest.mark.slow
def test_a_copy_that_is_lost_with_rank_0_is_made_again(tmp_path):
    """Rank 0 dies in the step behind the copy, before the driver has asked for it."""
    strikes = [Strike("kill", rank=0, step=5, phase="forward")]
    go_on(tmp_path, steps=8, strikes=strikes, spare_workers=1)
    assert steps_in(tmp_path) == [5]


BY_BATCH = {"scheduler_step_freq": "batch"}


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_state_of_fewer_shards_than_workers_is_refused_also_where_some_are_lost():
    """The replacement that joins then would have no shard."""
    with trainer_of(Classifier) as two:
        two.train(num_steps=1)
        state = two.state_dict()
    strikes = [Strike("kill", rank=2, step=1, phase="forward")]
    with trainer_of(Classifier, strikes, num_workers=3) as trainer:
        trainer.train(num_steps=3)
        with pytest.raises(CheckpointError, match="fewer shards than there are workers"):
            trainer.load_state_dict(state)
        assert trainer.status()["step"] == 3


class Counting(Classifier):
    """What it keeps differs from rank to rank."""

    seen = 0.0

    def compute_loss(self, batch, batch_info):
        self.seen += float(batch[0].sum())
        return super().compute_loss(batch, batch_info)

    def state_dict(self):
        return {"seen": self.seen, "rank": self.world_rank}

    def load_state_dict(self, state):
        assert state["rank"] == self.world_rank
        self.seen = state["seen"]


def seen_by(operator):
    return operator.seen


@pytest.mark.slow
def test_what_operators_keep_is_that_of_each_rank(tmp_path):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": 5, **BY_BATCH}
    with trainer_of(Counting, **arguments) as trainer:
        trainer.train(num_steps=5)
        at_five = trainer.apply_all_operators(seen_by)
        trainer.train(num_steps=8)
        expected = trainer.apply_all_operators(seen_by)
    state = checkpoint.read(tmp_path / "step-0000000010.ckpt")
    by_rank = state["operator_by_rank"]
    assert [each["rank"] for each in by_rank] == [0, 1]
    assert len({each["seen"] for each in by_rank}) == 2
    assert by_rank[0]["seen"] != at_five[0]
    resume = tmp_path / "step-0000000010.ckpt"
    with trainer_of(Counting, resume=resume, **BY_BATCH) as trainer:
        trainer.train(num_steps=3)
        assert trainer.apply_all_operators(seen_by) == expected


def _halve_rate(operator):
    operator.optimizer.param_groups[0]["lr"] /= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator_cls", "sync"),
    [(Classifier, "replicate"), (Counting, "replicate"), (InShards, "fsdp")],
)
def test_what_was_changed_between_two_calls_is_gone_on_with(tmp_path, operator_cls, sync):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": 5, "resume": "auto", **BY_BATCH}
    with trainer_of(operator_cls, sync=sync, **arguments) as trainer:
        trainer.train(num_steps=5)
        trainer.apply_all_operators(_halve_rate)
        trainer.train(num_steps=3)
        expected = digest(trainer)
    with trainer_of(operator_cls, sync=sync, **arguments) as trainer:
        assert trainer.status()["step"] == 5
        trainer.train(num_steps=3)
        assert digest(trainer) == expected


class GrowingLoss(DefaultLoop):
    """The loss depends on how many there were before, which each rank counts for itself."""

    count = 0

    def compute_loss(self, batch, batch_info):
        self.count += 1
        return super().compute_loss(batch, batch_info) * (1 + self.count / 10)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "through"),
    [("replicate", "file"), ("replicate", "memory"), ("fsdp", "file"), ("fsdp", "memory")],
)
def test_what_operators_keep_is_saved_as_it_was_when_the_window_began(tmp_path, sync, through):
    """The window's batches are computed again, and find what they found the first time."""
    arguments = {"accumulate": 4, "config": {BATCH_SIZE: 4}}
    with trainer_of(GrowingLoss, num_workers=1, **arguments) as trainer:
        trainer.train(num_steps=9)
        expected = trainer.get_model()
    arguments["sync"] = sync
    with trainer_of(GrowingLoss, **arguments) as trainer:
        trainer.train(num_steps=7)
        state, path = trainer.state_dict(), trainer.save(tmp_path / "within.ckpt")
    assert state["operator_by_rank"] == [{"count": 4}] * 2
    with trainer_of(GrowingLoss, **arguments) as trainer:
        trainer.load(path) if through == "file" else trainer.load_state_dict(state)
        assert trainer.status()["step"] == 4
        trainer.train(num_steps=5)
        assert farthest(trainer.get_model(), expected) < 1e-12


class Fails(Classifier):
    def compute_loss(self, batch, batch_info):
        if self.global_step == 7:
            raise ZeroDivisionError
        return super().compute_loss(batch, batch_info)


@pytest.mark.slow
def test_a_copy_that_was_made_before_a_failure_is_written(tmp_path):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": 5, **BY_BATCH}
    with pytest.raises(ZeroDivisionError), trainer_of(Fails, **arguments) as trainer:
        trainer.train(num_steps=20)
    assert steps_in(tmp_path) == [5]


class Interrupted(Classifier):
    """Somebody presses Ctrl-C just after the state was copied for a checkpoint."""

    was_there = False

    def compute_loss(self, batch, batch_info):
        if self.world_rank == 0 and batch_info["global_step"] == 5 and not self.was_there:
            self.was_there = True
            os.kill(self.config["driver"], signal.SIGINT)
        return super().compute_loss(batch, batch_info)


@pytest.mark.slow
@pytest.mark.parametrize("is_on_its_way", [False, True])
def test_a_copy_of_steps_that_the_run_has_left_is_not_written(tmp_path, is_on_its_way):
    folder = tmp_path / "run"
    config = {"*batch_size": 16, "driver": os.getpid()}
    arguments = {"config": config, "checkpoint_dir": folder, "checkpoint_every": 5}
    with trainer_of(Interrupted, **arguments) as trainer:
        trainer.train(num_steps=2)
        path = trainer.save(tmp_path / "two.pt")
        with pytest.raises(KeyboardInterrupt):
            trainer.train(num_steps=8)
        if is_on_its_way:
            fetcher = trainer._disk.writer._fetcher
            if fetcher._asked is None or ray.get(fetcher._asked) is None:
                fetcher.poll()
            assert ray.get(fetcher._asked) is not None
        trainer.load(path)
        trainer.train(num_steps=2)
        assert steps_in(folder) == []
        trainer.train(num_steps=2)
        assert steps_in(folder) == [5]
        assert trainer.status()["step"] == 6


class Warned(Classifier):
    def compute_loss(self, batch, batch_info):
        if self.world_rank == 1 and self.global_step == self.config.get("warned_at"):
            os.kill(self.config["driver"], signal.SIGTERM)
        return super().compute_loss(batch, batch_info)


@pytest.fixture
def own_handler():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    yield calls
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_sigterm_saves_before_a_handler_of_ones_own(tmp_path, own_handler):
    config = {"*batch_size": 16, "driver": os.getpid(), "warned_at": 3}
    with trainer_of(Warned, config=config, checkpoint_dir=tmp_path, **BY_BATCH) as trainer:
        trainer.train(num_steps=12)
        assert trainer.status()["step"] == 12
    (step,) = steps_in(tmp_path)
    assert 3 <= step <= 12  # rank 0 may hear of it before it begins the step that rank 1 is in
    assert own_handler == [1]


@pytest.mark.slow
@pytest.mark.parametrize("use_local", [False, True])
def test_sigterm_saves_at_the_next_step_and_ends(tmp_path, use_local):
    expected = run_through()
    config = {"*batch_size": 16, "driver": os.getpid(), "warned_at": 3}
    arguments = {"config": config, "checkpoint_dir": tmp_path, "use_local": use_local, **BY_BATCH}
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(SystemExit) as caught,
        trainer_of(Warned, **arguments) as trainer,
    ):
        trainer.train(num_steps=10_000)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    (step,) = steps_in(tmp_path)
    assert step >= 3  # rank 0 may hear of it before it begins the step that rank 1 is in
    if step < STEPS:
        assert go_on(tmp_path) == (step, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator_cls", "arguments"),
    [
        (TwoPlayers, {}),
        (OwnEpoch, {}),
        (Windows, {}),
        (Classifier, {"accumulate": 3, "scheduler_step_freq": "epoch"}),
        (Classifier, {"sync": "ddp"}),
        (Classifier, {"sync": "parameter_server"}),
        (Classifier, {"sync": "data_parallel"}),
    ],
)
def test_other_loops_and_ways_to_synchronise(tmp_path, operator_cls, arguments):
    expected = run_through(operator_cls, **arguments)
    began, _ = go_on(tmp_path, operator_cls, steps=STOP, **arguments)
    assert began == 0
    began, got = go_on(tmp_path, operator_cls, **arguments)
    assert 0 < began <= STOP
    assert got == expected


@pytest.mark.slow
def test_shards_of_weights_are_put_together(tmp_path):
    with trainer_of(Classifier, sync="fsdp") as trainer:
        trainer.train(num_steps=STEPS)
        expected = trainer.get_model().state_dict()
    go_on(tmp_path, steps=STOP, sync="fsdp")
    assert (tmp_path / "step-0000000010.ckpt").is_dir()
    arguments = {"checkpoint_dir": tmp_path, "resume": "auto", "sync": "fsdp"}
    with trainer_of(Classifier, **arguments) as trainer:
        assert trainer.status()["step"] == 10
        trainer.train(num_steps=STEPS - 10)
        got = trainer.get_model().state_dict()
    assert all(got[name].equal(expected[name]) for name in expected)


DRIVER = """
import sys
import ray
from tests.ray.surviving import Classifier, digest, trainer_of

if __name__ == "__main__":
    ray.init(address=sys.argv[2], log_to_driver=False)
    arguments = {"checkpoint_dir": sys.argv[1], "checkpoint_every": 50, "resume": "auto"}
    with trainer_of(Classifier, **arguments) as trainer:
        left = 800 - trainer.status()["step"]
        trainer.train(num_steps=left)
        print("bits", digest(trainer), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_driver_of_several_workers_is_killed(tmp_path):
    """Its workers end with it, and the next driver goes on from what it left."""
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    root = Path(__file__).parents[2]

    def driver(folder):
        paths = [str(root), str(root / "tests"), str(root / "src")]
        command = [sys.executable, str(program), str(folder), ray.get_runtime_context().gcs_address]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def bits(process):
        lines = process.communicate(timeout=200)[0].decode().splitlines()
        return [line for line in lines if line.startswith("bits")]

    with driver(tmp_path / "undisturbed") as process:
        expected = bits(process)
    folder = tmp_path / "killed"
    for step in (50, 300):
        with driver(folder) as process:
            while process.poll() is None and not any(
                int(path.stem.removeprefix("step-")) >= step for path in folder.glob("step-*")
            ):
                time.sleep(0.02)
            process.kill()
            assert process.wait() == -signal.SIGKILL
    assert steps_in(folder)[-1] >= 300
    with driver(folder) as process:
        assert bits(process) == expected != []
