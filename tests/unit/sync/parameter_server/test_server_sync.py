# SPDX-License-Identifier: Apache-2.0
"""A parameter server in the process of its only worker outlives an error in a step."""

import pytest
from tests.ray.surviving import Classifier, OwnEpoch, TwoPlayers, digest, trainer_of

from lockstep.testing import Strike


def served(operator_cls, *strikes):
    return trainer_of(operator_cls, strikes, num_workers=1, sync="parameter_server")


def finished(run):
    left = run.train()["batch_count"]
    run.train()
    return left, digest(run)


@pytest.mark.sampled
@pytest.mark.parametrize("action", ["raise", "interrupt"])
@pytest.mark.parametrize(
    ("operator_cls", "phase"),
    [
        (Classifier, "backward"),
        (Classifier, "optimizer"),
        (TwoPlayers, "optimizer"),
        (TwoPlayers, "applied"),
        (OwnEpoch, "applied"),
    ],
)
def test_the_run_ends_with_the_bits_of_one_that_nobody_left(operator_cls, phase, action):
    """Also where the first of two optimizers has stepped, and its step is undone at the server."""
    with served(operator_cls) as run:
        batches, expected = finished(run)
    with served(operator_cls, Strike(action, 0, 4, phase)) as run:
        with pytest.raises(KeyboardInterrupt if action == "interrupt" else RuntimeError):
            run.train()
        done = run.status()["step"]
        assert bool(run.state_dict()["optimizers"][0]["state"]) == (done > 0)
        assert finished(run) == (batches - done, expected)
