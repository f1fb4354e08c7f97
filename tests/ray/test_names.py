# SPDX-License-Identifier: Apache-2.0
"""What Ray's dashboard calls a trainer's processes, and that the names are free again."""

import re
import time

import pytest
from tests.ray.operators import DefaultLoop

import ray
from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE


def names():
    return {name for name in ray.util.list_named_actors() if name.startswith("lockstep:")}


def start(**arguments):
    return TorchTrainer(
        training_operator_cls=DefaultLoop, num_workers=2, config={BATCH_SIZE: 12}, **arguments
    )


@pytest.mark.slow
def test_workers_that_serve_one_trainer_after_the_other_are_named_so():
    with start():
        first = names()
    with start():
        assert names() == first
    assert len(first) == 2
    # An earlier trainer may have lost some: what replaces them has a mark or a number of its own.
    assert all(re.fullmatch(r"lockstep:kept:\w{6}:worker\d+", name) for name in first)


@pytest.mark.slow
@pytest.mark.usefixtures("workers_end_with_their_trainer")
def test_workers_of_one_trainer_carry_its_operators_name():
    with start(sync="parameter_server", num_cpus_per_worker=2) as trainer:
        found = names()
        marks = {name.split(":")[2] for name in found}
        assert len(marks) == 1
        assert {name.replace(*marks, "x") for name in found} == {
            "lockstep:DefaultLoop:x:worker0",
            "lockstep:DefaultLoop:x:worker1",
            "lockstep:DefaultLoop:x:parameter-server",
        }
        trainer.train(num_steps=1)
    deadline = time.monotonic() + 10
    while names() & found and time.monotonic() < deadline:
        time.sleep(0.05)  # Ray hears of the end of a process from its node
    assert not names() & found
