# SPDX-License-Identifier: Apache-2.0
"""A worker dies, or Ctrl-C comes, while the run recovers from the death of a worker."""

import os
import signal
import threading
from functools import cache

import pytest
import torch
from tests.ray.surviving import GLOBAL_BATCH, Classifier, digest, trainer_of, until_complete

import lockstep.worker
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike
from lockstep.worker import loop_run, position_queries, state_broadcast

# Setups here replace functions of lockstep's in their processes. Each death starts a process that
# imports torch: seconds, and many where the processors are busy.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("workers_end_with_their_trainer"),
]

STEPS = 8


def is_first(mark):
    """Whether no process has asked before for the file `mark`."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def recovering(operator_cls, folder, strikes=(), num_workers=3, config=(), **arguments):
    config = {BATCH_SIZE: GLOBAL_BATCH, "mark": str(folder / "mark"), **dict(config)}
    arguments = {"num_workers": num_workers, "reproducible": True, **arguments}
    return trainer_of(operator_cls, strikes, config=config, **arguments)


@cache
def undisturbed_steps(num_workers):
    """The samples and the weights after `STEPS` steps."""
    with trainer_of(Classifier, num_workers=num_workers, reproducible=True) as trainer:
        return trainer.train(num_steps=STEPS)["num_samples"], digest(trainer)


class DiesInJoin(Classifier):
    """One rank of the next group dies when the others have received its state."""

    def setup(self, config):
        super().setup(config)
        compare = state_broadcast.agree_on_bits

        def compare_and_die(group, *arguments, **options):
            compare(group, *arguments, **options)
            # To this comparison each rank came with the state.
            if group.rank == config["dies"] and is_first(config["mark"]):
                os.kill(os.getpid(), signal.SIGKILL)

        state_broadcast.agree_on_bits = compare_and_die


def test_a_spare_that_received_the_state_goes_on_alone(tmp_path):
    """It has trained no step of the call, and knows from the driver how many there were."""
    expected = undisturbed_steps(2)
    strikes = [Strike("kill", rank=0, step=5, phase="forward")]
    arguments = {"num_workers": 2, "spare_workers": 1, "config": {"dies": 1}}
    with recovering(DiesInJoin, tmp_path, strikes, **arguments) as trainer:
        samples = trainer.train(num_steps=STEPS)["num_samples"]
        status = trainer.status()
        assert status["step"] == STEPS
        assert (samples, digest(trainer)) == expected
    assert [len(each["lost"]) for each in status["recoveries"]] == [2]


class NewcomersFail(Classifier):
    """A worker that takes a place has no room for the state, or its module is another one."""

    def setup(self, config):
        super().setup(config)
        self.is_newcomer = self._lockstep.context.is_spare

    def state_dict(self):
        return {"mine": 1}

    def load_state_dict(self, state):
        if self.is_newcomer:
            raise torch.OutOfMemoryError("no room for the state")


def test_a_spare_that_cannot_take_the_state_is_left_out(tmp_path):
    """Also the replacement that starts then; the survivors are whole, and go on."""
    expected = undisturbed_steps(2)
    strikes = [Strike("kill", rank=1, step=3, phase="forward")]
    arguments = {"num_workers": 2, "spare_workers": 1}
    with recovering(NewcomersFail, tmp_path, strikes, **arguments) as trainer:
        samples = trainer.train(num_steps=STEPS)["num_samples"]
        status = trainer.status()
        assert status["step"] == STEPS
        assert (samples, digest(trainer)) == expected
    first, *_ = status["recoveries"]
    assert len(first["lost"]) == 2
    assert "no room for the state" in first["why"]
    assert first["workers"] == 1


def test_without_enough_workers_the_error_of_those_that_cannot_join_is_raised(tmp_path):
    strikes = [Strike("kill", rank=1, step=3, phase="forward")]
    arguments = {"num_workers": 2, "spare_workers": 1, "min_workers": 2}
    with (
        recovering(NewcomersFail, tmp_path, strikes, **arguments) as trainer,
        pytest.raises(torch.OutOfMemoryError, match="no room for the state"),
    ):
        trainer.train(num_steps=STEPS)


class OneFallsBehind(DiesInJoin):
    """Rank 2 dies after a step that rank 0 has committed, and that rank 1 has not."""

    def setup(self, config):
        super().setup(config)
        self.optimizer.register_step_pre_hook(self.fall_behind)

    def fall_behind(self, *_):
        group = self._lockstep.context.group
        while self.world_rank == 1 and self.global_step == 5 and group.size == 3:
            group.refuse_if_given_up("a step")  # raises when the driver has given the group up
            threading.Event().wait(0.01)

    def compute_loss(self, batch, batch_info):
        ahead = self.config["mark"] + ".ahead"
        if self.global_step == 6 and self.world_rank == 0:
            open(ahead, "a").close()
        if self.global_step == 6 and self.world_rank == 2 and is_first(ahead + ".dead"):
            while not os.path.exists(ahead):
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_loss(batch, batch_info)


def test_a_survivor_that_was_a_step_behind_goes_on_alone(tmp_path):
    """It received the state of a step that it has not counted itself."""
    expected = undisturbed_steps(3)
    with recovering(OneFallsBehind, tmp_path, config={"dies": 0}) as trainer:
        samples = trainer.train(num_steps=STEPS)["num_samples"]
        status = trainer.status()
        assert status["step"] == STEPS
        assert (samples, digest(trainer)) == expected
    assert [len(each["lost"]) for each in status["recoveries"]] == [2]


class InterruptsRecovery(Classifier):
    """Ctrl-C comes in the driver while a worker takes a step back."""

    def setup(self, config):
        super().setup(config)
        forget_step = self._lockstep.forget_step

        def interrupt_and_forget():
            if is_first(config["mark"]):
                os.kill(config["driver"], signal.SIGINT)
            forget_step()

        self._lockstep.forget_step = interrupt_and_forget


@pytest.mark.parametrize("min_workers", [1, 2])
def test_after_ctrl_c_in_a_recovery_the_lost_worker_is_reported_and_replaced(min_workers, tmp_path):
    _, bits = undisturbed_steps(2)
    strikes = [Strike("kill", rank=1, step=3, phase="forward")]
    arguments = {"num_workers": 2, "min_workers": min_workers, "config": {"driver": os.getpid()}}
    with recovering(InterruptsRecovery, tmp_path, strikes, **arguments) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(num_steps=STEPS)
        status = trainer.status()
        assert status["step"] == 3
        assert status["workers"] == min_workers
        (recovery,) = status["recoveries"]
        assert "rank 1" in recovery["lost"][0]
        until_complete(trainer, 2)
        trainer.train(num_steps=STEPS - 3)
        assert digest(trainer) == bits


class ActsWhenAsked(Classifier):
    """Rank 0 sends a signal once, when it is asked how many samples a lost worker had."""

    def setup(self, config):
        super().setup(config)
        answer = position_queries.samples_of._function

        def act_and_answer(worker, *arguments):
            if worker.rank == 0 and is_first(config["mark"]):
                os.kill(config.get("driver", os.getpid()), config["signal"])
            return answer(worker, *arguments)

        position_queries.samples_of._function = act_and_answer


RANK_1_DIES = Strike("kill", rank=1, step=5, phase="forward")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_when_it_is_asked_is_recovered_from(number, tmp_path):
    expected = undisturbed_steps(3)
    arguments = {"config": {"signal": number}, "hang_timeout_s": 3}
    with recovering(ActsWhenAsked, tmp_path, [RANK_1_DIES], **arguments) as trainer:
        samples = trainer.train(num_steps=STEPS)["num_samples"]
        status = trainer.status()
        assert status["step"] == STEPS
        assert (samples, digest(trainer)) == expected
    assert [len(each["lost"]) for each in status["recoveries"]] == [1, 1]


def test_ctrl_c_while_a_worker_is_asked_leaves_the_workers_alive(tmp_path):
    _, bits = undisturbed_steps(3)
    config = {"signal": signal.SIGINT, "driver": os.getpid()}
    with recovering(ActsWhenAsked, tmp_path, [RANK_1_DIES], config=config) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train(num_steps=STEPS)
        status = trainer.status()
        assert len(status["recoveries"]) == 1
        assert status["step"] >= 5
        trainer.train(num_steps=STEPS - status["step"])
        assert digest(trainer) == bits


class Marks(Classifier):
    """The metrics of the last rank say 1; before step 6 the driver has its counts of six steps."""

    def setup(self, config):
        super().setup(config)
        self.is_marked = self.world_rank == 2
        self.are_counts_known, num_answers = threading.Event(), 0
        answer, forget_step = lockstep.worker.status_of, self._lockstep.forget_step
        loop_run._COUNT_EVERY_S = 0.0

        def answer_and_count(worker, thread_id):
            nonlocal num_answers
            status = answer(worker, thread_id)
            num_answers += status.steps == 6 and status.counted is not None
            if num_answers == 2:  # the driver asks again when it has taken the first answer
                self.are_counts_known.set()
            return status

        def forget_or_die():
            if self.is_marked and config["dies"] and is_first(config["mark"]):
                os.kill(os.getpid(), signal.SIGKILL)
            forget_step()

        lockstep.worker.status_of, self._lockstep.forget_step = answer_and_count, forget_or_die

    def compute_loss(self, batch, batch_info):
        if self.is_marked and batch_info["global_step"] == 6:
            self.are_counts_known.wait()
        return super().compute_loss(batch, batch_info), {"mark": float(self.is_marked)}


@pytest.mark.parametrize("dies_in_recovery", [False, True])
def test_the_metrics_of_a_worker_that_dies_at_or_soon_after_a_recovery_count(
    dies_in_recovery, tmp_path
):
    """Rank 2 is rank 1 after the first death."""
    deaths = [Strike("kill", rank=1, step=step, phase="forward") for step in (6, 7)]
    deaths = deaths[:1] if dies_in_recovery else deaths
    config = {"dies": dies_in_recovery}
    with recovering(Marks, tmp_path, deaths, config=config) as trainer:
        result = trainer.train(num_steps=STEPS)
        lost = [each for one in trainer.status()["recoveries"] for each in one["lost"]]
    assert len(lost) == 2
    # Six of eight steps of a third of the samples.
    assert result["mark"] > 0.15
