# SPDX-License-Identifier: Apache-2.0
"""Losses over the rows of all ranks, where a rank without samples computes on a borrowed batch.

Workers are threads over real gloo. What a rank computes on a borrowed batch has weight 0, and the
operator's code has to run on it all the same.
"""

from typing import ClassVar

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from harness import cut, rows
from lockstep import TrainingOperator
from lockstep.operator import Options
from lockstep.worker import LoopRequest, WorkerSpec
from ranks.contrastive import clip, towers
from ranks.table import run_workers
from ranks.table_operators import sgd

NUM_SAMPLES, GLOBAL_BATCH, NUM_SHARDS = 37, 12, 4
"""The fourth batch of an epoch is one sample: all workers but one borrow it."""
LEFT, RIGHT = rows(NUM_SAMPLES, 5, seed=71), rows(NUM_SAMPLES, 4, seed=72)
PIECES = [range(start, min(start + GLOBAL_BATCH, NUM_SAMPLES)) for start in range(0, 37, 12)]


def rows_to_columns(a, b, scale):
    return functional.cross_entropy(scale * a @ b.T, torch.arange(len(a)))


class Recipe(TrainingOperator):
    """The one of docs/gather.md."""

    joint_loss = True
    true_loss = staticmethod(rows_to_columns)
    trained: ClassVar = {}

    def setup(self, config):
        model = towers()
        self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
        loader = DataLoader(TensorDataset(LEFT, RIGHT), GLOBAL_BATCH // NUM_SHARDS)
        self.register_data(train_loader=loader, validation_loader=loader)

    def compute_loss(self, batch, batch_info):
        a, b = self.model(*batch)
        mine = lockstep.rank_slice(a)
        assert len(range(mine.start, mine.stop)) == len(a)
        logits = self.model.scale * a @ lockstep.gather(b).T
        labels = torch.arange(mine.start, mine.stop)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return lockstep.global_mean(losses)

    def after_step(self):
        state = self.model.state_dict()
        self.trained[self.world_rank] = {name: each.clone() for name, each in state.items()}


class OwnPlaces(Recipe):
    """A rank's rows are picked from the gathered ones."""

    def compute_loss(self, batch, batch_info):
        a, b = self.model(*batch)
        everyone = lockstep.gather(a)
        mine = lockstep.rank_slice(a)
        logits = self.model.scale * everyone[mine] @ lockstep.gather(b).T
        picked = logits.log_softmax(1)[torch.arange(len(a)), torch.arange(mine.start, mine.stop)]
        return lockstep.global_mean(-picked)


class OfPairs(Recipe):
    """Losses of pairs, to which something of the batch's own length is added."""

    true_loss = staticmethod(clip)

    def compute_loss(self, batch, batch_info):
        losses = lockstep.info_nce(*self.model(*batch), self.model.scale, reduction="none")
        return lockstep.global_mean(losses * torch.ones(len(batch[0])))


class OfViews(Recipe):
    @staticmethod
    def true_loss(a, b, scale):
        views = torch.cat([a, b])
        similar = (scale * views @ views.T).fill_diagonal_(-torch.inf)
        partners = torch.arange(len(views)).roll(len(a))
        return functional.cross_entropy(similar, partners)

    def compute_loss(self, batch, batch_info):
        (a, b), scale = self.model(*batch), self.model.scale
        losses = lockstep.nt_xent(a, b, scale, reduction="none")
        return lockstep.global_mean(losses * torch.ones(2 * len(a)))


OWN_PARTS = [PIECES[0], range(16, 25)]
"""Of the two workers' own loaders: of 2, and of 8 rows a batch."""
OWN_BATCH = [2, 8]


class OfOwnLoaders(Recipe):
    """Worker 1 repeats its last batch, which has more rows than worker 0 brings."""

    def setup(self, config):
        model = towers()
        self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))
        part, size = OWN_PARTS[self.world_rank], OWN_BATCH[self.world_rank]
        left, right = LEFT[part.start : part.stop], RIGHT[part.start : part.stop]
        loader = DataLoader(TensorDataset(left, right), size, drop_last=True)
        self.register_data(train_loader=loader)


def on_workers(operator_cls, size, options):
    """The reports of an epoch and of a validation, by worker."""
    operator_cls.trained.clear()
    num_shards = NUM_SHARDS if options.add_dist_sampler else size
    spec = WorkerSpec(operator_cls, {}, size, num_shards=num_shards, seed=0, options=options)

    def body(worker):
        done = worker.train(LoopRequest("train", None, False, {}))
        if not options.add_dist_sampler:
            return done, None
        return done, worker.validate(LoopRequest("validation", None, False, {}))

    return run_workers(spec, body)


def one_process(loss, pieces):
    """The model after an epoch, and its steps' losses."""
    model, losses = towers(), []
    optimizer = sgd(model)
    for piece in pieces:
        optimizer.zero_grad()
        found = loss(*model(LEFT[piece], RIGHT[piece]), model.scale)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return model, losses


def assert_weights(operator_cls, size, model):
    assert set(operator_cls.trained) == set(range(size))
    for found in operator_cls.trained.values():
        for name, true in model.state_dict().items():
            assert (found[name] - true).abs().max() <= 1e-12, name


def mean(losses):
    sizes = map(len, PIECES)
    return sum(n * loss for n, loss in zip(sizes, losses, strict=True)) / NUM_SAMPLES


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("operator_cls", [Recipe, OwnPlaces, OfPairs, OfViews])
def test_the_weights_and_losses_of_one_process(operator_cls, size):
    pieces = [torch.tensor(list(piece)) for piece in PIECES]
    model, losses = one_process(operator_cls.true_loss, pieces)
    results = on_workers(operator_cls, size, Options())
    assert_weights(operator_cls, size, model)
    with torch.no_grad():
        checked = [
            operator_cls.true_loss(*model(LEFT[piece], RIGHT[piece]), model.scale).item()
            for piece in pieces
        ]
    for name, which, true in (("train_loss", 0, losses), ("val_loss", 1, checked)):
        passes = [done for result in results for done in result[which].passes]
        counted = [(done.metrics[name], done.samples) for done in passes]
        assert sum(samples for _, samples in counted) == NUM_SAMPLES
        # The driver's mean: each worker's is over its own samples.
        total = sum(loss * samples for loss, samples in counted if samples)
        assert total / NUM_SAMPLES == pytest.approx(mean(true), rel=1e-12)


def test_a_repeated_batch_with_more_rows_than_all_workers_bring():
    """Worker 1 has one batch of 8 rows, and then repeats it beside 2 rows of worker 0."""
    on_workers(OfOwnLoaders, 2, Options(add_dist_sampler=False))
    taken = cut(12, [2] * 6)
    pieces = [torch.arange(piece.start, piece.stop) for piece in taken]
    pieces[0] = torch.cat([pieces[0], torch.arange(16, 24)])
    model, _ = one_process(rows_to_columns, pieces)
    assert_weights(OfOwnLoaders, 2, model)
