# SPDX-License-Identifier: Apache-2.0
"""``sync="fsdp"`` with one worker, whose shard is the whole, and what it refuses."""

import os

import pytest
from tests.unit.trainer.programs import by_hand, same, trainer, weights

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


@pytest.mark.parametrize("arguments", [{"reproducible": True}, {"use_local": True}])
def test_refused_before_anything_starts(arguments):
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        trainer(sync="fsdp", num_workers=2, **arguments)
