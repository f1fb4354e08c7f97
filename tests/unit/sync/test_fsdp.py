# SPDX-License-Identifier: Apache-2.0
"""``sync="fsdp"`` with one worker, whose shard is the whole, and what it refuses."""

import os

import pytest
from tests.unit.trainer.programs import Regression, by_hand, same, trainer, weights

from lockstep.errors import ConfigurationError


def test_one_shard_is_the_whole_and_saves_a_directory(tmp_path):
    with trainer(sync="fsdp") as run:
        run.train(num_steps=2)
        path = run.save(tmp_path / "state")
        run.train(num_steps=3)
        assert same(weights(run.get_model()), by_hand(5))
        assert os.path.isdir(path)
        run.load(path)
        run.train(num_steps=3)
        assert same(weights(run.get_model()), by_hand(5))


class FailsTwice(Regression):
    """After an optimizer's step, in two of them, once in each."""

    def after_step(self):
        if self.global_step in (1, 3) and self.global_step not in self.config["failed"]:
            self.config["failed"].append(self.global_step)
            raise RuntimeError("no such luck")


def test_one_worker_goes_on_after_each_error():
    """It has no partner: it undoes the step itself, or counts it."""
    with trainer(FailsTwice, sync="fsdp", config={"failed": []}) as run:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no such luck"):
                run.train(num_steps=4)
        run.train(num_steps=5 - run.status()["step"])
        assert same(weights(run.get_model()), by_hand(5))


@pytest.mark.parametrize("arguments", [{"reproducible": True}, {"use_local": True}])
def test_refused_before_anything_starts(arguments):
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        trainer(sync="fsdp", num_workers=2, **arguments)
