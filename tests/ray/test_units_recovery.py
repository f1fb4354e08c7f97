# SPDX-License-Identifier: Apache-2.0
"""Workers die whose part of the model nobody else has, and no step is lost."""

import os
import random
import signal
import time

import pytest
from tests.ray.operators import farthest
from tests.ray.surviving import digest_of, until_complete
from tests.ray.surviving_in_shards import (
    PHASES,
    STEPS_IN_EPOCH,
    EveryOther,
    InShards,
    Interrupted,
    OwnEpoch,
    StepsBeforeTheNextBatch,
    counts,
    kill,
    run,
    trainer_of,
    undisturbed,
)

from lockstep import Callback, checkpoint
from lockstep.errors import ConfigurationError, WorkerDiedError
from lockstep.testing import Strike

# Each death starts a process that imports torch: seconds, and many where the processors are busy.
pytestmark = pytest.mark.timeout(240)

EVERY = 4


@pytest.mark.other_workers
@pytest.mark.parametrize(
    ("phase", "step"),
    [
        ("backward", 10),
        *(
            pytest.param(phase, step, marks=pytest.mark.slow)
            for phase in PHASES
            for step in (0, 7, 13)
        ),
    ],
)
def test_a_spare_takes_the_place_and_no_bit_changes(phase, step):
    expected, _, bits = undisturbed(InShards, noise=0.3)
    arguments = {"config": {"noise": 0.3}, "spare_workers": 1}
    with trainer_of(InShards, [kill(1, step, phase)], **arguments) as trainer:
        results, model = run(trainer)
        (recovery,) = trainer.status()["recoveries"]
    assert digest_of(model) == bits
    assert counts(results) == counts(expected)
    assert recovery["same_bits"]
    assert recovery["replayed"] <= EVERY + 1
    assert recovery["workers"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "rank"), [("optimizer", 0), *((phase, 2) for phase in PHASES)])
def test_fewer_go_on_with_other_rows_to_the_same_weights(phase, rank):
    expected, whole, _ = undisturbed(InShards)
    with trainer_of(InShards, [kill(rank, 9, phase)]) as trainer:
        results, model = run(trainer)
        status = trainer.status()
    assert farthest(model, whole) < 1e-12
    assert counts(results) == counts(expected)
    assert not status["recoveries"][0]["same_bits"]
    assert status["step"] == 2 * STEPS_IN_EPOCH + 4


@pytest.mark.slow
def test_down_to_one_worker_and_up_again():
    expected, whole, _ = undisturbed(InShards)
    strikes = [kill(1, 3), kill(0, 5, "forward"), kill(0, 9, "applied")]
    with trainer_of(InShards, strikes, spare_workers=1) as trainer:
        results, model = run(trainer)
        recoveries = trainer.status()["recoveries"]
    assert farthest(model, whole) < 1e-12
    assert counts(results) == counts(expected)
    assert sum(len(each["lost"]) for each in recoveries) == 3


PART = 5
"""Steps of a call, in each of which somebody dies."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_kills(seed):
    """One in each of four calls, in a random phase of a random step; a spare takes each place."""
    draw = random.Random(seed)
    strikes = [
        kill(draw.randrange(3), PART * call + draw.randrange(PART), draw.choice(PHASES[1:5]))
        for call in range(4)
    ]
    with trainer_of(InShards, config={"noise": 0.3}) as trainer:
        expected, bits = _by_calls(trainer, workers=3)
    with trainer_of(InShards, strikes, {"noise": 0.3}, spare_workers=1) as trainer:
        results, got = _by_calls(trainer, workers=4)
        recoveries = trainer.status()["recoveries"]
    assert got == bits
    assert counts(results) == counts(expected)
    assert len(recoveries) == 4
    assert all(each["replayed"] <= EVERY + 1 and each["same_bits"] for each in recoveries)


def _by_calls(trainer, workers):
    results = []
    for _ in range(4):
        until_complete(trainer, workers)
        results.append(trainer.train(num_steps=PART))
    return results, digest_of(trainer.get_model())


@pytest.mark.slow
@pytest.mark.parametrize("operator_cls", [EveryOther, StepsBeforeTheNextBatch, OwnEpoch])
@pytest.mark.parametrize("step", [5, 9])
def test_loops_of_ones_own(operator_cls, step):
    expected, _, bits = undisturbed(operator_cls, noise=0.3)
    arguments = {"config": {"noise": 0.3}, "spare_workers": 1}
    with trainer_of(operator_cls, [kill(1, step)], **arguments) as trainer:
        results, model = run(trainer)
        (recovery,) = trainer.status()["recoveries"]
    assert digest_of(model) == bits
    assert counts(results) == counts(expected)
    assert recovery["same_bits"]


@pytest.mark.slow
@pytest.mark.parametrize("operator_cls", [InShards, EveryOther])
def test_steps_of_earlier_calls_are_computed_again(operator_cls):
    """By short calls, of which each counts its batches from 0."""

    def by_threes(trainer):
        results = [trainer.train(num_steps=3) for _ in range(6)]
        return results, digest_of(trainer.get_model())

    arguments = {"config": {"noise": 0.3}, "memory_checkpoint_every": 50}
    with trainer_of(operator_cls, **arguments) as trainer:
        expected, bits = by_threes(trainer)
    with trainer_of(operator_cls, [kill(2, 14)], spare_workers=1, **arguments) as trainer:
        results, got = by_threes(trainer)
        (recovery,) = trainer.status()["recoveries"]
    assert got == bits
    assert counts(results) == counts(expected)
    assert recovery["replayed"] > 4


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, 3])
def test_windows_of_the_default_loop(accumulate):
    expected, _, bits = undisturbed(InShards, noise=0.3, accumulate=accumulate)
    arguments = {"config": {"noise": 0.3}, "spare_workers": 1, "accumulate": accumulate}
    with trainer_of(InShards, [kill(1, 10)], **arguments) as trainer:
        results, model = run(trainer)
    assert digest_of(model) == bits
    assert counts(results) == counts(expected)


@pytest.mark.slow
def test_whole_models_with_optimizers_in_shards():
    expected, _, bits = undisturbed(InShards, noise=0.3, shard="whole")
    config = {"noise": 0.3, "shard": "whole"}
    with trainer_of(InShards, [kill(1, 10)], config, spare_workers=1) as trainer:
        results, model = run(trainer)
        (recovery,) = trainer.status()["recoveries"]
    assert digest_of(model) == bits
    assert counts(results) == counts(expected)
    assert recovery["workers"] == 3


def _halve(operator):
    for parameter in operator.model.parameters():
        parameter.data.mul_(0.5)


def _halve_and_fail(operator):
    _halve(operator)
    if operator.world_rank == 1:
        raise RuntimeError("on rank 1 alone")


def change(trainer):
    trainer.apply_all_operators(_halve)
    trainer.update_scheduler(0.0)


def change_and_fail(trainer):
    with pytest.raises(RuntimeError, match="on rank 1 alone"):
        trainer.apply_all_operators(_halve_and_fail)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [change, change_and_fail])
def test_what_a_program_changes_between_calls_is_not_undone(changes):
    def changed(trainer):
        trainer.train(num_steps=5)
        changes(trainer)
        trainer.train(num_steps=5)
        return digest_of(trainer.get_model())

    with trainer_of(InShards) as trainer:
        bits = changed(trainer)
    with trainer_of(InShards, [kill(1, 6)], spare_workers=1) as trainer:
        assert changed(trainer) == bits
        assert len(trainer.status()["recoveries"]) == 1


@pytest.mark.slow
def test_ranks_agree_on_the_measured_interval_after_a_spare_has_joined():
    arguments = {"memory_checkpoint_every": "auto", "spare_workers": 1}
    with trainer_of(InShards, **arguments) as trainer:
        bits = _many_steps(trainer)
    with trainer_of(InShards, [kill(1, 11), kill(2, 40)], **arguments) as trainer:
        assert _many_steps(trainer) == bits
        assert len(trainer.status()["recoveries"]) == 2


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_with_one_worker(tmp_path):
    """A plain backward on the last batch, which is smaller, when nothing is reduced any more."""
    expected, whole, _ = undisturbed(EveryOther, num_workers=2)
    with trainer_of(EveryOther, [kill(1, 5)], num_workers=2) as trainer:
        results, model = run(trainer)
        assert trainer.status()["workers"] == 1
        path = trainer.save(tmp_path / "state")
    assert counts(results) == counts(expected)
    assert farthest(model, whole) < 1e-12
    with trainer_of(EveryOther, num_workers=2) as again:
        again.load(path)
        assert farthest(again.get_model(), model) == 0.0


def _many_steps(trainer):
    for _ in range(3):
        until_complete(trainer, workers=4)
        trainer.train(num_steps=35)
    return digest_of(trainer.get_model())


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4, 10])
@pytest.mark.parametrize("changes", [False, True])
def test_windows_that_lie_across_calls(step, changes):
    def by_threes(trainer):
        results = []
        for _ in range(5):
            results.append(trainer.train(num_steps=3))
            if changes:
                trainer.apply_all_operators(_slow_down)
        return results, trainer.status()["step"], digest_of(trainer.get_model())

    arguments = {"config": {"noise": 0.3}, "accumulate": 2, "memory_checkpoint_every": 5}
    with trainer_of(InShards, **arguments) as trainer:
        expected, steps, bits = by_threes(trainer)
    with trainer_of(InShards, [kill(1, step)], spare_workers=1, **arguments) as trainer:
        results, reached, got = by_threes(trainer)
        assert len(trainer.status()["recoveries"]) == 1
    assert counts(results) == counts(expected)
    assert (reached, got) == (steps, bits)


@pytest.mark.slow
@pytest.mark.parametrize("spare_workers", [0, 1])
def test_a_death_in_a_validation_between_the_batches_of_a_window(spare_workers):
    """The window's gradients go with the group; its first batch is computed once more."""

    def by_threes(trainer):
        results = [trainer.train(num_steps=3), trainer.validate(), trainer.train(num_steps=3)]
        return results, trainer.status()["step"], trainer.get_model()

    arguments = {"accumulate": 2, "memory_checkpoint_every": 5}
    with trainer_of(InShards, **arguments) as trainer:
        expected, steps, whole = by_threes(trainer)
    strikes = [Strike("kill", rank=1, step=3, phase="validation")]
    with trainer_of(InShards, strikes, spare_workers=spare_workers, **arguments) as trainer:
        results, reached, model = by_threes(trainer)
        assert len(trainer.status()["recoveries"]) == 1
    assert counts(results) == counts(expected)
    assert reached == steps == 6
    assert farthest(model, whole) < 1e-12
    assert results[2]["train_loss"] == pytest.approx(expected[2]["train_loss"], rel=1e-12)


def _slow_down(operator):
    # Not the weights: with others the window's first gradient, computed again, would be another.
    for group in operator.optimizer.param_groups:
        group["lr"] *= 0.5


class DiesInReplay(InShards):
    """Another worker dies while the steps since the checkpoint are computed again."""

    def compute_loss(self, batch, batch_info):
        is_target = self._lockstep.is_uncounted and self.world_rank == self.config["rank"]
        if is_target and not os.path.exists(self.config["mark"]):
            open(self.config["mark"], "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_loss(batch, batch_info)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "rank"), [(3, 0), (3, 1), (2, 0)])
def test_another_death_while_steps_are_computed_again(workers, rank, tmp_path):
    """With two workers the spare, which has not trained, is the only one that is left."""
    expected, whole, _ = undisturbed(InShards, num_workers=workers)
    config = {"mark": str(tmp_path / "dead"), "rank": rank}
    arguments = {"num_workers": workers, "spare_workers": 1, "scheduler_step_freq": "batch"}
    with trainer_of(DiesInReplay, [kill(1, 10)], config, **arguments) as trainer:
        results, model = run(trainer)
        recoveries = trainer.status()["recoveries"]
    assert sum(len(each["lost"]) for each in recoveries) == 2
    assert farthest(model, whole) < 1e-12
    assert [each["batch_count"] for each in results] == [each["batch_count"] for each in expected]


@pytest.mark.slow
def test_a_validation_goes_on_where_it_was():
    def validated(trainer):
        seen = [trainer.validate(num_steps=2)]
        trainer.train(num_steps=6)
        seen.append(trainer.validate(num_steps=2))
        trainer.train(num_steps=5)
        seen.append(trainer.validate(num_steps=2))
        return [each["val_loss"] for each in seen]

    with trainer_of(InShards, memory_checkpoint_every=50) as trainer:
        expected = validated(trainer)
    arguments = {"memory_checkpoint_every": 50, "spare_workers": 1}
    with trainer_of(InShards, [kill(1, 8)], **arguments) as trainer:
        assert validated(trainer) == expected


@pytest.mark.slow
def test_a_state_that_is_loaded_survives(tmp_path):
    with trainer_of(InShards) as trainer:
        trainer.train(num_steps=9)
        path = trainer.save(tmp_path / "state")
        trainer.train(num_steps=3)
        bits = digest_of(trainer.get_model())
    with trainer_of(InShards, [kill(1, 10)], spare_workers=1) as trainer:
        trainer.train(num_steps=2)
        trainer.load(path)
        trainer.train(num_steps=3)
        assert trainer.status()["step"] == 12
        assert digest_of(trainer.get_model()) == bits


class Steps(Callback):
    every = 1

    def __init__(self):
        self.seen = []

    def on_step(self, trainer, step, metrics):
        self.seen.append((step, metrics["train_loss"]))


@pytest.mark.slow
def test_callbacks_hear_of_each_step_once():
    told = []
    for strikes in ((), [kill(1, 11)]):
        steps = Steps()
        with trainer_of(InShards, strikes, spare_workers=1, callbacks=[steps]) as trainer:
            run(trainer)
        told.append(steps.seen)
    assert [step for step, _ in told[1]] == list(range(1, 2 * STEPS_IN_EPOCH + 5))
    # Before the death a row may lack the part of the worker that is gone.
    assert told[1][12:] == told[0][12:]


@pytest.mark.slow
def test_after_an_error_of_the_programs_own_the_run_goes_on():
    with trainer_of(InShards) as trainer:
        trainer.train(num_steps=9)
        bits = digest_of(trainer.get_model())
    with trainer_of(Interrupted, config={"once": []}) as trainer:
        with pytest.raises(RuntimeError, match="no such luck"):
            trainer.train(num_steps=9)
        assert trainer.status()["step"] == 6
        trainer.train(num_steps=3)
        assert digest_of(trainer.get_model()) == bits


@pytest.mark.slow
def test_neighbours_that_die_together_take_a_part_with_them():
    with trainer_of(InShards) as trainer:
        trainer.train(num_steps=3)
        pids = trainer.apply_all_operators(_pid)
        for pid in pids[:2]:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="part of the state is lost"):
            trainer.train(num_steps=3)


def _pid(operator):
    return os.getpid()


@pytest.mark.slow
def test_a_death_between_calls():
    with trainer_of(InShards) as trainer:
        trainer.train(num_steps=6)
        os.kill(trainer.apply_all_operators(_pid)[1], signal.SIGKILL)
        assert trainer.status()["step"] == 6
        trainer.train(num_steps=3)
        model = trainer.get_model()
    with trainer_of(InShards) as trainer:
        trainer.train(num_steps=9)
        assert farthest(model, trainer.get_model()) < 1e-12


@pytest.mark.slow
def test_checkpoints_on_disk_go_on_after_a_death(tmp_path):
    def checkpointed(folder, strikes=()):
        arguments = {"checkpoint_dir": folder, "checkpoint_every": 5, "keep_checkpoints": 9}
        with trainer_of(InShards, strikes, spare_workers=1, **arguments) as trainer:
            _, model = run(trainer)
        return sorted(os.listdir(folder)), digest_of(model)

    expected = checkpointed(tmp_path / "calm")
    # Not behind step 10: a part that is being written is lost with its worker.
    assert checkpointed(tmp_path / "killed", [kill(1, 14)]) == expected
    arguments = {"checkpoint_dir": tmp_path / "killed", "checkpoint_every": 5}
    with trainer_of(InShards, resume="auto", **arguments) as trainer:
        assert trainer.status()["step"] == 15
        trainer.train(num_steps=3)
        assert digest_of(trainer.get_model()) == expected[1]


class FailsWhileItWrites(InShards):
    """Its parts of a checkpoint are on the disk some time after the error."""

    def setup(self, config):
        super().setup(config)
        write_part = checkpoint.write_part

        def slowly(*arguments):
            time.sleep(2)
            return write_part(*arguments)

        checkpoint.write_part = slowly

    def compute_loss(self, batch, batch_info):
        if self.global_step == 7:
            raise ZeroDivisionError
        return super().compute_loss(batch, batch_info)


@pytest.mark.slow
@pytest.mark.usefixtures("workers_end_with_their_trainer")
@pytest.mark.parametrize("every", [4, None])
def test_parts_that_were_copied_before_a_failure_are_written(every, tmp_path):
    """Where the run could have gone on, and where the failure ends the workers."""
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": 5}
    with (
        pytest.raises(ZeroDivisionError),
        trainer_of(FailsWhileItWrites, memory_checkpoint_every=every, **arguments) as trainer,
    ):
        trainer.train(num_steps=20)
    (path,) = (each for each in tmp_path.iterdir() if each.name != "run.jsonl")
    assert path.name == "step-0000000005.ckpt"
    assert checkpoint.read(path)["global_step"] == 5


@pytest.mark.slow
def test_without_copies_a_death_ends_the_run():
    trainer = trainer_of(InShards, [kill(1, 2)], memory_checkpoint_every=None)
    with trainer, pytest.raises(WorkerDiedError):
        trainer.train()


@pytest.mark.parametrize("every", [0, -1, "often", 2.5])
def test_how_often_is_a_number_or_auto(every):
    with pytest.raises(ConfigurationError, match="memory_checkpoint_every"):
        trainer_of(InShards, memory_checkpoint_every=every)
