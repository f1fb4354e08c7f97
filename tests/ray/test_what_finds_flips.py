# SPDX-License-Identifier: Apache-2.0
"""What finds a bit that flips on one of three ranks: shadow, watch or replay.

The table of docs/how-to/can-i-trust-this-machine.md is this table.
"""

from functools import partial

import pytest
from tests.ray.surviving import Classifier, trainer_of

from lockstep import TorchTrainer
from lockstep.errors import AuditError
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Flip, flipped
from lockstep.trainer.step_replay import replay_run

STEPS, RANK = 24, 1
EVERY = 4
IN_SHADOWED_SHARD, ELSEWHERE = 7, 9
"""Steps, counted from 0: every fourth one is looked at, and in the second of those the shard is
that of rank 1."""

A_WEIGHT, A_BIAS = 0.1, 0.995
"""Positions: one of the 320 weights of the first layer, few of which the watch samples; and one of
the last layer's 5 biases, a number that it samples. (Batch normalisation subtracts a bias of the
first layer again, but for rounding, and on some processors no later bit is another one.)"""

TABLE = {
    # place, step, position: found by the shadow, by the watch, by a replay of the run
    ("gradient", IN_SHADOWED_SHARD, A_WEIGHT): (True, False, False),
    ("activation", IN_SHADOWED_SHARD, A_WEIGHT): (True, False, False),
    ("gradient", ELSEWHERE, A_WEIGHT): (False, False, True),
    ("activation", ELSEWHERE, A_WEIGHT): (False, False, True),
    ("weight", ELSEWHERE, A_WEIGHT): (True, False, True),
    ("weight", ELSEWHERE, A_BIAS): (True, True, True),
    ("message", ELSEWHERE, A_BIAS): (True, True, True),
    ("optimizer", ELSEWHERE, A_BIAS): (True, True, True),
}


def arguments(folder=None, **more):
    return {
        "num_workers": 3,
        "reproducible": True,
        "config": {BATCH_SIZE: 16},
        "checkpoint_dir": folder,
        "scheduler_step_freq": "batch",
    } | more


def found_by_shadow(flip):
    with trainer_of(
        flipped(Classifier, flip), **arguments(shadow_every=EVERY, audit="off", shadow_limit=99)
    ) as trainer:
        trainer.train(num_steps=STEPS)
        wrong = trainer.status()["shadow"]["wrong"]
    assert {each["worker"][:6] for each in wrong} <= {f"rank {RANK}"}
    return bool(wrong)


def found_by_watch(flip):
    with trainer_of(flipped(Classifier, flip), **arguments()) as trainer:
        try:
            trainer.train(num_steps=STEPS)
        except AuditError:
            return True
    return False


def found_by_replay(flip, folder, **more):
    with trainer_of(flipped(Classifier, flip), **arguments(folder, audit="off", **more)) as trainer:
        trainer.train(num_steps=STEPS)
    # The operator without the flip: a machine that computes what is right.
    make_trainer = partial(TorchTrainer, training_operator_cls=Classifier)
    return not replay_run(make_trainer, folder=folder, step=STEPS).same_bits


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("place", "step", "position"), TABLE, ids=str)
def test_who_finds_it(place, step, position, tmp_path):
    flip = Flip(place, rank=RANK, step=step, position=position, bit=20)
    corrects = step == IN_SHADOWED_SHARD
    found = (
        found_by_shadow(flip),
        found_by_watch(flip),
        # What the shadow has corrected is in no weight.
        found_by_replay(flip, tmp_path / "run", shadow_every=EVERY if corrects else 0),
    )
    assert found == TABLE[place, step, position]
