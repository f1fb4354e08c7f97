# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while workers load a state: it is one of two states, or an error says what to do."""

import os
import signal

import pytest
from tests.ray.surviving import Classifier, digest, trainer_of

from lockstep.errors import TrainerClosedError
from lockstep.keys import BATCH_SIZE

CALLS = ("state_dict", "load_state_dict")


class Interrupted(Classifier):
    """Somebody presses Ctrl-C when a rank saves what it has, or loads the new state."""

    armed = False

    def state_dict(self):
        self._press("state_dict")
        return {"own": self.world_rank}

    def load_state_dict(self, state):
        self._press("load_state_dict")

    def _press(self, call):
        if self.armed == (call, self.world_rank):
            self.left -= 1
            if self.left < 0:
                self.armed = False
                os.kill(self.config["driver"], signal.SIGINT)


def arm(operator, call, rank, left):
    operator.armed, operator.left = (call, rank), left


def state_or_advice(trainer):
    """The digest of its state; or, where the workers were ended, the error of the next call."""
    try:
        return digest(trainer)
    except TrainerClosedError as closed:
        return str(closed)


@pytest.mark.sampled
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sync", ["replicate", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ctrl_c_leaves_one_state_or_says_what_to_do(sync, call, rank, tmp_path):
    config = {BATCH_SIZE: 16, "driver": os.getpid()}
    with trainer_of(Interrupted, config=config, sync=sync) as trainer:
        trainer.train(num_steps=2)
        path = trainer.save(tmp_path / "run")
        saved = digest(trainer)
        trainer.train(num_steps=2)
        present = digest(trainer)
        # In shards the call that arms it ends with a memory checkpoint, which asks for the state.
        left = int(sync == "fsdp" and call == "state_dict")
        trainer.apply_all_operators(lambda operator: arm(operator, call, rank, left))
        with pytest.raises(KeyboardInterrupt):
            trainer.load(path)
        found = state_or_advice(trainer)
        if "create a new TorchTrainer" in found:
            return
        assert found in (saved, present)
        assert trainer.status()["step"] == (2 if found == saved else 4)
        trainer.load(path)
        assert digest(trainer) == saved
        trainer.train(num_steps=1)
        assert trainer.status()["step"] == 3
