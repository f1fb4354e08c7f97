# SPDX-License-Identifier: Apache-2.0
"""With peers, too, a loop says before its first read what the epoch reads.

`lockstep.worker.loop_run` and `lockstep.worker.data_cursor`, with workers as threads.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from harness import side_by_side
from lockstep import TrainingOperator
from lockstep.keys import BATCH_SIZE
from lockstep.worker import LoopRequest, Worker, WorkerSpec
from ranks.test_break_group import Workers

BATCH = 10
REST = LoopRequest("train", None, False, {})


class Window(Sampler):
    """Twenty rows, from one that the loop moves."""

    first = 0

    def __iter__(self):
        return iter(range(self.first, self.first + 20))

    def __len__(self):
        return 20


class Curriculum(TrainingOperator):
    def setup(self, config):
        generator = torch.Generator().manual_seed(3)
        rows = torch.randn(60, 3, generator=generator, dtype=torch.float64)
        self.data, self.sampler = list(zip(rows, rows.sum(1, keepdim=True), strict=True)), Window()
        model = nn.Linear(3, 1, dtype=torch.float64)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            criterion=nn.MSELoss(),
        )
        self.register_data(train_loader=self.loader(config[BATCH_SIZE]))

    def loader(self, batch_size):
        return DataLoader(self.data, batch_size, sampler=self.sampler)

    def train_epoch(self, iterator, info):
        self.sampler.first = 10 * (info["epoch_idx"] + 1)
        return super().train_epoch(iterator, info)


class Grows(Curriculum):
    def loader(self, batch_size):
        self.later, self.data[20:] = self.data[20:], []
        return DataLoader(self.data, batch_size)

    def train_epoch(self, iterator, info):
        self.data += self.later[:10]
        del self.later[:10]
        return super().train_epoch(iterator, info)


class ShufflesAnew(Curriculum):
    def loader(self, batch_size):
        self.generator = torch.Generator()
        return DataLoader(self.data, batch_size, sampler=self.shuffled())

    def shuffled(self):
        return torch.utils.data.RandomSampler(self.data, generator=self.generator)

    def train_epoch(self, iterator, info):
        self.generator.manual_seed(1000 + info["epoch_idx"])
        return super().train_epoch(iterator, info)


class ReadsOnOneRank(Curriculum):
    """Ends on the other rank without having read anything."""

    def train_epoch(self, iterator, info):
        if self.world_rank == 0:
            next(iter(iterator))
        return {}


def on_two_ranks(operator_cls, requests, monkeypatch):
    """Steps and weights by rank."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    pair, found = Workers(operator_cls, 2), [None, None]
    pair.start()

    def train(rank):
        steps = [pair.workers[rank].train(request).steps for request in requests]
        found[rank] = steps, weights(pair.workers[rank])

    try:
        side_by_side(train, 2)
    finally:
        side_by_side(lambda rank: pair.workers[rank].stop(), 2)
    return found


def weights(worker):
    return torch.cat([each.detach().flatten() for each in worker.operator.model.parameters()])


def in_one_process(operator_cls, requests):
    spec = WorkerSpec(operator_cls, {BATCH_SIZE: BATCH}, num_workers=1, num_shards=2, seed=0)
    worker = Worker(spec, 0, 0)
    worker.start(None)
    steps = [worker.train(request).steps for request in requests]
    found = steps, weights(worker)
    worker.stop()
    return found


@pytest.mark.parametrize("operator_cls", [Curriculum, Grows, ShufflesAnew])
def test_what_a_loop_sets_before_its_first_read_holds_in_this_epoch(operator_cls, monkeypatch):
    requests = [REST, LoopRequest("train", 1, False, {}), REST, REST]
    steps, expected = in_one_process(operator_cls, requests)
    for found in on_two_ranks(operator_cls, requests, monkeypatch):
        assert found[0] == steps
        assert torch.allclose(found[1], expected, rtol=1e-12, atol=1e-13)


def test_a_rank_that_reads_nothing_keeps_no_peer_waiting(monkeypatch):
    (one, _), (other, _) = on_two_ranks(ReadsOnOneRank, [REST], monkeypatch)
    assert (one, other) == ([1], [0])
