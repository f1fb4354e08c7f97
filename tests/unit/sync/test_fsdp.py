# SPDX-License-Identifier: Apache-2.0
"""``sync="fsdp"`` with one worker, whose shard is the whole, and what it refuses."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.unit.trainer.programs import Regression, by_hand, same, trainer, weights

from lockstep.errors import ConfigurationError
from lockstep.group import Group
from lockstep.sync.fsdp import FSDPSync


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


class NotesLimits(Group):
    """A group that notes how long it is asked to wait at most."""

    def __init__(self, process_group):
        super().__init__(process_group)
        self.limits = []

    def monitored_all_gather(self, *arguments, max_s=300.0):
        self.limits.append(max_s)
        return super().monitored_all_gather(*arguments)


def test_a_rank_waits_for_its_peers_as_long_as_the_group_says():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, model = NotesLimits(dist.group.WORLD), torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = FSDPSync([model], group, [optimizer])
        sync.backward(model(torch.ones(3, 2)).mean())
        optimizer.step()
        sync.detach()
        assert group.limits == [float("inf")] * 2  # the group's own timeout is shorter
    finally:
        group.close()
        dist.destroy_process_group()
