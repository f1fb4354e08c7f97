# SPDX-License-Identifier: Apache-2.0
"""A worker and the one with the copy of its part die together: the run goes back to the disk."""

import pytest
import torch
from tests.ray.operators import farthest
from tests.ray.surviving import digest_of
from tests.ray.surviving_in_shards import (
    InShards,
    counts,
    kill,
    network,
    run,
    trainer_of,
    undisturbed,
)
from torch import nn

from lockstep import checkpoint
from lockstep.errors import WorkerDiedError

# Each death starts a process that imports torch: seconds, and many where the processors are busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def _on_disk(folder):
    """The checkpoints of these tests, 5 steps apart, and room for two spares."""
    return {
        "checkpoint_dir": folder,
        "checkpoint_every": 5,
        "resources_per_worker": {"CPU": 0.5},
    }


@pytest.mark.parametrize(("step", "spares"), [(13, 2), (15, 2), (13, 0), (15, 0)])
def test_neighbours_that_die_together_come_back_from_the_disk(step, spares, tmp_path):
    """In the call that the checkpoint was taken in, and in the one after it."""
    noise = 0.3 if spares else 0.0  # as many workers draw the same numbers
    expected, whole, bits = undisturbed(InShards, noise=noise)
    arguments = {"config": {"noise": noise}, "spare_workers": spares, **_on_disk(tmp_path)}
    with trainer_of(InShards, [kill(1, step), kill(2, step)], **arguments) as trainer:
        results, model = run(trainer)
        recoveries = trainer.status()["recoveries"]
    assert counts(results) == counts(expected)
    assert farthest(model, whole) < 1e-12
    assert (
        all(each["same_bits"] for each in recoveries) == (digest_of(model) == bits) == bool(spares)
    )
    paths = [each["checkpoint"] for each in recoveries if each["checkpoint"]]
    assert len(paths) == 1
    assert paths[0].startswith(str(tmp_path))
    assert sum(len(each["lost"]) for each in recoveries) == 2


def test_a_checkpoint_of_before_a_change_is_not_gone_back_to(tmp_path):
    with trainer_of(InShards, [kill(1, 8), kill(2, 8)], **_on_disk(tmp_path)) as trainer:
        trainer.train(num_steps=7)
        trainer.apply_all_operators(_halve)
        with pytest.raises(WorkerDiedError, match="part of the state is lost"):
            trainer.train(num_steps=3)


def test_a_host_that_does_not_see_the_directory_is_sent_its_rows(tmp_path):
    _, _, bits = undisturbed(InShards)
    arguments = {"spare_workers": 2, "scheduler_step_freq": "batch", **_on_disk(tmp_path)}
    with trainer_of(OnAHostOfItsOwn, [kill(1, 13), kill(2, 13)], **arguments) as trainer:
        _, model = run(trainer)
        paths = [each["checkpoint"] for each in trainer.status()["recoveries"]]
        (asked, *_) = trainer.apply_all_operators(lambda operator: operator.asked)
    assert any(paths)
    assert asked
    assert digest_of(model) == bits


class OnAHostOfItsOwn(InShards):
    """Rank 0 finds no checkpoint under the path that it is told, as on a host without the disk."""

    def setup(self, config):
        super().setup(config)
        self.asked = []
        if self.world_rank == 0:
            checkpoint.is_here = self._sees_nothing

    def _sees_nothing(self, stored):
        self.asked.append(stored.folder)
        return False


def test_what_is_each_ranks_own_is_on_no_disk(tmp_path):
    strikes = [kill(1, 8), kill(2, 8)]
    with trainer_of(InShards, strikes, {"own": True}, **_on_disk(tmp_path)) as trainer:
        trainer.train(num_steps=7)
        assert list(tmp_path.glob("step-*"))
        with pytest.raises(WorkerDiedError, match="part of the state is lost"):
            trainer.train(num_steps=3)


class KeepsItsBackboneToItself(nn.Sequential):
    """Its checkpoints leave out what does not train, as programs that tune a large model do."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: held for name, held in state.items() if not name.startswith("1.")}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class OnABackbone(InShards):
    network = staticmethod(lambda noise: KeepsItsBackboneToItself(*network(noise)))

    def setup(self, config):
        super().setup(config)
        self.model[1].requires_grad_(False)


@pytest.mark.parametrize("spare_workers", [0, 1])
def test_weights_that_a_model_leaves_out_of_its_state_survive(spare_workers):
    with trainer_of(OnABackbone) as trainer:
        _, whole = run(trainer)
    with trainer_of(OnABackbone, [kill(1, 6)], spare_workers=spare_workers) as trainer:
        _, model = run(trainer)
        assert len(trainer.status()["recoveries"]) == 1
    assert farthest(model, whole) < 1e-12


def test_weights_that_a_model_leaves_out_of_its_state_are_on_no_disk(tmp_path):
    strikes = [kill(1, 8), kill(2, 8)]
    with trainer_of(OnABackbone, strikes, **_on_disk(tmp_path)) as trainer:
        trainer.train(num_steps=7)
        assert list(tmp_path.glob("step-*"))
        with pytest.raises(WorkerDiedError, match="part of the state is lost"):
            trainer.train(num_steps=3)


def _halve(operator):
    with torch.no_grad():
        for parameter in operator.model.parameters():
            parameter.mul_(0.5)
