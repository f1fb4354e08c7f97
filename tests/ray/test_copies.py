# SPDX-License-Identifier: Apache-2.0
"""Two copies of a model, each sharded over two workers: a death costs no committed step."""

import os
import random
import signal
from functools import cache

import pytest
import torch
from tests.ray.operators import farthest
from tests.ray.surviving import digest_of, until_complete
from tests.ray.surviving_in_shards import (
    GLOBAL_BATCH,
    PHASES,
    InShards,
    Interrupted,
    counts,
    kill,
    run,
    trainer_of,
)

from lockstep.errors import ConfigurationError, ReplicasDifferError

pytestmark = pytest.mark.timeout(240)

COPIES = {"num_workers": 4, "resources_per_worker": {"CPU": 0.5}}


class WritesToWeights(InShards):
    """As prototypes that are normalised: some weights are written to before each forward."""

    def compute_loss(self, batch, batch_info):
        with torch.no_grad():
            self.kept[0].mul_(0.9)
            self.kept[1].data.add_(0.01)
            if self.global_step >= 8:
                self.kept[2].mul_(0.9)  # late: the versions alone tell of it
        return super().compute_loss(batch, batch_info)


class LoadsOnOneRank(InShards):
    """Weights that come to one rank alone, after all ranks had been given the same."""

    def setup(self, config):
        super().setup(config)
        if self.world_rank == 3:
            with torch.no_grad():
                self.kept[1].add_(1.0)


class SwapsInValidation(InShards):
    """Other weights while it validates; one worker dies in the middle, once."""

    def validate_batch(self, batch, batch_info):
        before = [each.detach().clone() for each in self.kept]
        with torch.no_grad():
            for each in self.kept:
                each.mul_(0.5)
        if self.world_rank == 1 and self.config["marker"] and not self.config["marker"].exists():
            self.config["marker"].touch()
            os.kill(os.getpid(), signal.SIGKILL)
        result = super().validate_batch(batch, batch_info)
        with torch.no_grad():
            for each, value in zip(self.kept, before, strict=True):
                each.copy_(value)
        return result


def in_copies(strikes=(), noise=0.0, operator_cls=InShards, marker=None, **arguments):
    # Only what the survivors hold can be that new: none is taken in memory after the first one.
    arguments = {"memory_checkpoint_every": 100} | COPIES | arguments
    config = {"noise": noise, "dp_shard_size": 2, "marker": marker}
    return trainer_of(operator_cls, strikes, config, **arguments)


@cache
def undisturbed_copies(noise, operator_cls=InShards):
    with in_copies(noise=noise, operator_cls=operator_cls) as trainer:
        results, model = run(trainer)
    return results, model, digest_of(model)


@cache
def one_process():
    with trainer_of(InShards, num_workers=1) as trainer:
        run(trainer)
        return trainer.get_model()


def goes_on(path, **arguments):
    """The run from the checkpoint on, with other workers."""
    with trainer_of(InShards, **arguments) as trainer:
        trainer.load(path)
        trainer.train(num_steps=4)
        assert farthest(trainer.get_model(), one_process()) < 1e-12


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of copies, whose weights are those of one process before and after it."""
    path = tmp_path_factory.mktemp("copies") / "run"
    with in_copies() as trainer:
        for _ in range(2):
            trainer.train()
        trainer.validate()
        trainer.save(path)
        trainer.train(num_steps=4)
        assert farthest(trainer.get_model(), one_process()) < 1e-12
    return path


@pytest.mark.slow
def test_copies_train_as_one_process_which_goes_on_from_their_checkpoint(saved):
    goes_on(saved, num_workers=1)


@pytest.mark.slow
def test_one_copy_goes_on_from_a_checkpoint_of_copies(saved):
    goes_on(saved)


@pytest.mark.slow
def test_copies_go_on_from_a_checkpoint_of_copies(saved):
    goes_on(saved, config={"dp_shard_size": 2}, **COPIES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "step"),
    [
        ("backward", 10),
        *((phase, step) for phase in PHASES for step in (0, 7, 13)),
    ],
)
def test_a_spare_takes_the_place_and_no_step_is_computed_again(phase, step):
    expected, _, bits = undisturbed_copies(0.3)
    with in_copies([kill(1, step, phase)], 0.3, spare_workers=1) as trainer:
        results, model = run(trainer)
        (recovery,) = trainer.status()["recoveries"]
    assert digest_of(model) == bits
    assert counts(results) == counts(expected)
    assert recovery["same_bits"]
    assert recovery["workers"] == 4
    assert recovery["replayed"] <= 1  # the open one


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "rank"), [("forward", 3), *((phase, 0) for phase in PHASES)])
def test_fewer_go_on_with_one_copy(phase, rank):
    with in_copies([kill(rank, 9, phase)]) as trainer:
        results, model = run(trainer)
        (recovery,) = trainer.status()["recoveries"]
        assert trainer.verify().ok
    assert farthest(model, one_process()) < 1e-12
    assert results[-1]["num_samples"] == 4 * GLOBAL_BATCH
    assert recovery["replayed"] <= 1  # the open one


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 8, 9])
def test_what_a_forward_has_written_to_weights_is_written_once(step):
    _, _, bits = undisturbed_copies(0.0, WritesToWeights)
    strikes, operator_cls = [kill(1, step, "data")], WritesToWeights
    with in_copies(strikes, operator_cls=operator_cls, spare_workers=1) as trainer:
        _, model = run(trainer)
        (recovery,) = trainer.status()["recoveries"]
    assert digest_of(model) == bits
    # What is written late cannot be undone in that step: the run goes back to its beginning.
    assert recovery["replayed"] <= (1 if step != 8 else 9)


@pytest.mark.slow
def test_weights_that_a_validation_has_swapped_are_not_those_of_a_step(tmp_path):
    _, _, bits = undisturbed_copies(0.0, SwapsInValidation)
    arguments = {"operator_cls": SwapsInValidation, "marker": tmp_path / "died"}
    with in_copies(spare_workers=1, **arguments) as trainer:
        _, model = run(trainer)
        assert len(trainer.status()["recoveries"]) == 1
    assert digest_of(model) == bits


@pytest.mark.slow
def test_after_an_error_of_the_programs_own_the_run_goes_on():
    with in_copies() as trainer:
        trainer.train(num_steps=9)
        bits = digest_of(trainer.get_model())
    config = {"dp_shard_size": 2, "once": []}
    with trainer_of(Interrupted, config=config, memory_checkpoint_every=100, **COPIES) as trainer:
        with pytest.raises(RuntimeError, match="no such luck"):
            trainer.train(num_steps=9)
        assert trainer.status()["step"] == 6
        trainer.train(num_steps=3)
        assert digest_of(trainer.get_model()) == bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 5))],
)
def test_random_kills(seed):
    """One in each of four calls, in a random phase of a random step; a spare takes each place."""
    draw, steps = random.Random(seed), 5
    strikes = [
        kill(draw.randrange(4), steps * call + draw.randrange(steps), draw.choice(PHASES[1:5]))
        for call in range(4)
    ]

    def by_calls(trainer, workers):
        results = []
        for _ in range(4):
            until_complete(trainer, workers)
            results.append(trainer.train(num_steps=steps))
        return counts(results), digest_of(trainer.get_model())

    with in_copies(noise=0.3) as trainer:
        expected = by_calls(trainer, 4)
    with in_copies(strikes, 0.3, spare_workers=1) as trainer:
        assert by_calls(trainer, 5) == expected
        recoveries = trainer.status()["recoveries"]
    assert len(recoveries) == 4
    assert all(each["replayed"] <= 1 and each["same_bits"] for each in recoveries)


@pytest.mark.slow
def test_copies_that_setup_makes_different_are_refused_before_the_first_step():
    with pytest.raises(ReplicasDifferError, match="before the first step") as refused:
        in_copies(operator_cls=LoadsOnOneRank)
    assert refused.value.details["where"] == "rank 3 against rank 1"
    assert refused.value.details["got"] == "`0.bias`"


@pytest.mark.slow
def test_windows_and_clips_of_copies_are_held_against_one_process():
    with in_copies(accumulate=2, clip_grad_norm=0.3, audit="full") as trainer:
        trainer.train()
        assert trainer.verify().ok


@pytest.mark.slow
def test_a_number_that_does_not_divide_the_workers_is_refused():
    with pytest.raises(ConfigurationError, match="dp_shard_size=2, 3 workers"):
        trainer_of(InShards, config={"dp_shard_size": 2})


@pytest.mark.slow
def test_a_rank_that_has_moved_among_as_many_workers_has_its_new_rows(tmp_path):
    """Three workers twice in one run; who was the last of them is the middle one then."""
    with in_copies([kill(3, 3), kill(0, 10)]) as trainer:
        results = [trainer.train(num_steps=7)]
        until_complete(trainer, 4)
        results += [trainer.train(num_steps=7), trainer.validate()]
        assert len(trainer.status()["recoveries"]) == 2
        assert trainer.verify().ok
        trainer.save(tmp_path / "run")
        trainer.train(num_steps=4)
        assert farthest(trainer.get_model(), one_process()) < 1e-12
    goes_on(tmp_path / "run", num_workers=1)
