# SPDX-License-Identifier: Apache-2.0
"""Workers that compute wrong bits: a second worker sees it, a third one says who it was."""

import random

import pytest
import torch
from tests.ray.surviving import Classifier, Momentum, digest, trainer_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from lockstep import TrainingOperator
from lockstep.errors import SilentDataCorruptionError
from lockstep.keys import BATCH_SIZE, WEIGHT
from lockstep.testing import Flip, Strike, flipped, struck

STEPS = 100


def shadowed(operator_cls=Classifier, **arguments):
    arguments = {"num_workers": 3, "reproducible": True, "shadow_every": 1} | arguments
    if issubclass(operator_cls, Classifier):
        arguments["scheduler_step_freq"] = "batch"
    return trainer_of(operator_cls, **arguments)


def weights_of(operator_cls=Classifier, steps=STEPS, **arguments):
    """The bits that a run ends with, and what the shadow has found."""
    with shadowed(operator_cls, **arguments) as trainer:
        result = trainer.train(num_steps=steps)
        return bits_of(trainer, result), trainer.status()["shadow"]


def bits_of(trainer, result):
    """Of weights and buffers, the mean loss, and the rows that a torchmetrics object has seen."""
    return digest(trainer), result["train_loss"], float(result.get("train_rows", 0))


def owner_of(step):
    """The rank that has the shard that is compared in a step, counted from 0; three shards."""
    return step % 3


def checker_of(step):
    others = [rank for rank in range(3) if rank != owner_of(step)]
    return others[step // 3 % 2]


def random_flip(rng, step):
    """A flip in what the owner computes, or the checker after its own shard."""
    is_checkers = rng.random() < 0.3
    return Flip(
        rng.choice(["gradient", "activation"]),
        rank=checker_of(step) if is_checkers else owner_of(step),
        step=step,
        position=rng.random(),
        bit=rng.randrange(32),
        nth=1 if is_checkers else 0,
    )


@pytest.mark.other_workers
@pytest.mark.parametrize(
    ("steps", "step"), [(15, 7), pytest.param(200, 39, marks=pytest.mark.slow)]
)
def test_a_flipped_bit_is_seen_named_and_changes_nothing(steps, step):
    clean, nothing = weights_of(steps=steps, shadow_every=0)
    assert nothing == {"checked": 0, "wrong": []}
    flip = Flip("gradient", rank=owner_of(step), step=step, position=0.1, bit=20)
    bits, found = weights_of(flipped(Classifier, flip), steps=steps)
    assert bits == clean
    assert found["checked"] == steps
    (wrong,) = found["wrong"]
    assert (wrong["step"], wrong["shard"]) == (step + 1, owner_of(step))
    assert wrong["worker"].startswith(f"rank {owner_of(step)} (process ")
    assert wrong["tensor"].startswith("the gradient of ")
    assert wrong["device"] == "cpu"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 3))],
)
def test_three_times_a_hundred_flips(seed):
    """Each flip that changes a bit of the shard is found, and the run has the bits without it."""
    rng = random.Random(seed)
    flips = {step: random_flip(rng, step) for step in range(STEPS)}
    clean, _ = weights_of(shadow_every=0)
    bits, found = weights_of(flipped(Classifier, *flips.values()), shadow_limit=STEPS)
    assert bits == clean
    assert found["checked"] == STEPS
    by_step = {wrong["step"] - 1: wrong for wrong in found["wrong"]}
    for step, wrong in by_step.items():
        assert wrong["worker"].startswith(f"rank {flips[step].rank} (process "), wrong
    # An activation may be dropped out, or be one that ReLU makes zero, and the lowest bits of a
    # gradient are rounded away where it is divided by the number of shards: no bit has changed.
    missed = [flips[step] for step in flips.keys() - by_step.keys()]
    assert {flip.bit for flip in missed if flip.place == "gradient"} <= {0, 1}
    assert len(missed) < STEPS / 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_who_is_always_wrong_is_named_within_every_times_shards_and_replaced():
    every, began = 2, 5
    flip = Flip("activation", rank=1, step=began, position=0.1, bit=20, is_permanent=True)
    with shadowed(flipped(Classifier, flip), shadow_every=every, spare_workers=1) as trainer:
        trainer.train(num_steps=began + 3 * every)
        first = trainer.status()["shadow"]["wrong"][0]
        assert first["step"] <= began + 3 * every
        assert first["worker"].startswith("rank 1 ")
        while not trainer.status()["recoveries"]:
            trainer.train(num_steps=50)
        (recovery,) = trainer.status()["recoveries"]
        assert "computed wrong bits" in recovery["why"]
        assert "shadow_limit=3" in recovery["why"]
        named = len(trainer.status()["shadow"]["wrong"])
        trainer.train(num_steps=30)
        assert len(trainer.status()["shadow"]["wrong"]) == named
        assert trainer.status()["workers"] == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_say_one_of_the_two_and_refuse_to_go_on():
    """A bit that flips once is another one when both compute again; one that stays is not."""
    once = Flip("activation", rank=1, step=3, position=0.1, bit=20)
    clean, _ = weights_of(steps=10, num_workers=2, shadow_every=0)
    bits, found = weights_of(flipped(Classifier, once), steps=10, num_workers=2)
    assert bits == clean
    assert [wrong["worker"][:6] for wrong in found["wrong"]] == ["rank 1"]

    always = Flip("activation", rank=1, step=3, position=0.1, bit=20, is_permanent=True)
    with (
        shadowed(flipped(Classifier, always), num_workers=2) as trainer,
        pytest.raises(SilentDataCorruptionError, match=r"rank 1 .* or rank 0"),
    ):
        trainer.train(num_steps=20)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 2, "num_shards": 4},
        {"num_workers": 3, "num_shards": 7, "accumulate": 3},
    ],
    ids=str,
)
def test_a_flip_in_the_second_shard_of_a_worker(arguments):
    """What is put in its place are the shard's numbers, and no buffers of it."""
    steps, step = 12, 7 - 7 % arguments["num_shards"] + 1  # shard 1, which rank 0 has as well
    arguments = {"config": {BATCH_SIZE: 24}, **arguments}
    clean, _ = weights_of(OfManySizes, steps=steps, shadow_every=0, **arguments)
    flip = Flip("gradient", rank=0, step=step, position=0.2, bit=22, nth=1)
    bits, found = weights_of(flipped(OfManySizes, flip), steps=steps, **arguments)
    assert bits == clean
    assert [(each["step"], each["shard"]) for each in found["wrong"]] == [(step + 1, 1)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_shards": 4},
        {"num_shards": 7, "accumulate": 3},
        {"precision": "bf16", "clip_grad_norm": 0.5},
        {"num_workers": 2, "num_shards": 4},
        {"num_workers": 4, "accumulate": 2},
    ],
    ids=str,
)
def test_it_changes_no_bit_and_alarms_nobody(arguments):
    steps, arguments = 40, {"config": {BATCH_SIZE: 24}, **arguments}
    clean, _ = weights_of(OfManySizes, steps=steps, shadow_every=0, **arguments)
    with shadowed(OfManySizes, **arguments) as trainer:
        assert bits_of(trainer, trainer.train(num_steps=steps)) == clean
        assert trainer.status()["shadow"] == {"checked": steps, "wrong": []}
        counts = trainer.apply_all_operators(counts_of)
    num_shards = arguments.get("num_shards", arguments.get("num_workers", 3))
    for each in zip(*counts, strict=True):
        assert sum(each) == steps * num_shards


def counts_of(operator):
    """What the forwards of this worker have counted, in every place that has to be put back."""
    return operator.num_losses, len(operator.seen), int(operator.total), operator.model.forwards


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [3, 4])
def test_a_forward_that_writes_to_weights_alarms_nobody(num_shards):
    """The worker that computes another one's shard as well has moved them already."""
    clean, _ = weights_of(Momentum, steps=20, shadow_every=0, num_shards=num_shards)
    bits, found = weights_of(Momentum, steps=20, num_shards=num_shards)
    assert bits == clean
    assert found == {"checked": 20, "wrong": []}


class Counting(nn.Sequential):
    forwards = 0

    def forward(self, features):
        self.forwards += 1
        return super().forward(features)


class OfManySizes(TrainingOperator):
    """Dropout, batch norm, weights by tokens; counts, and inputs that a forward changes.

    The inputs are parts of one block: they lie in memory as no copy of them would by itself.
    """

    def setup(self, config):
        model = Counting(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        rows = torch.randn(158, 7, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(rows), config[BATCH_SIZE], collate_fn=halves)
        self.register_data(train_loader=loader)
        self.num_losses, self.seen, self.total = 0, [], torch.zeros(())
        self.rows = SumMetric()
        self.register_metrics(train={"rows": self.rows})

    def compute_loss(self, batch, batch_info):
        features, targets = batch
        features.mul_(0.5).add_(torch.rand(()))
        self.num_losses += 1
        self.seen.append(self.num_losses)
        self.total += 1
        self.rows.update(len(features))
        tokens = int((features > 0).sum())
        loss = (self.model(features) - targets).square().mean()
        return loss, {WEIGHT: tokens, "largest": features.max()}


def halves(rows):
    block = torch.stack([row for (row,) in rows])
    return block[:, 1:], block[:, :1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_that_die_beside_it_change_no_bit():
    clean, _ = weights_of(steps=30, shadow_every=0)
    flips = [Flip("gradient", rank=owner_of(step), step=step, bit=9) for step in (4, 11, 20)]
    strikes = [
        Strike("kill", rank=checker_of(8), step=8, phase="backward"),
        Strike("kill", rank=owner_of(15), step=15, phase="forward"),
    ]
    operator_cls = struck(flipped(Classifier, *flips), *strikes)
    with shadowed(operator_cls, spare_workers=2, num_cpus_per_worker=0.5) as trainer:
        trainer.train(num_steps=30)
        assert len(trainer.status()["recoveries"]) == 2
        assert digest(trainer) == clean[0]
        # In the order in which the driver heard of them: of workers that joined meanwhile, later.
        found = trainer.status()["shadow"]["wrong"]
        assert sorted(wrong["step"] for wrong in found) == [5, 12, 21]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_thousand_clean_steps_alarm_nobody():
    _, found = weights_of(steps=10_000)
    assert found == {"checked": 10_000, "wrong": []}
