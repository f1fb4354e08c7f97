# SPDX-License-Identifier: Apache-2.0
"""Workers as threads, without Ray: one is lost, the others regroup around the same store."""

import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, TensorDataset

from harness import assert_same, reset
from lockstep import TrainingOperator
from lockstep.keys import BATCH_SIZE
from lockstep.operator import Options
from lockstep.sync import ParameterServer
from lockstep.worker import (
    Formation,
    LoopRequest,
    Rendezvous,
    StartReport,
    Worker,
    WorkerSpec,
    join,
    leave_broken_group,
    verify,
)
from ranks.programs import X, Y, mlp, squared
from ranks.test_replicate_exact import weights

BATCH, STEPS = 6, 7


class Dies(Exception):
    """A rank is killed: its connections close."""


class TwoSteps(TrainingOperator):
    """Two optimizers step in a batch, the second one after a backward of its own."""

    strike = None

    def setup(self, config):
        model = reset(mlp(), seed=7)
        optimizers = [
            torch.optim.Adam(model[0].parameters(), lr=0.02),
            torch.optim.SGD(model[2].parameters(), lr=0.05, momentum=0.9),
        ]
        self.model, self.optimizers = self.register(models=model, optimizers=optimizers)
        self.register_data(train_loader=DataLoader(TensorDataset(X, Y), config[BATCH_SIZE]))

    def train_batch(self, batch, batch_info):
        for number, optimizer in enumerate(self.optimizers):
            optimizer.zero_grad()
            loss = squared(self.model)(*batch)
            self.reach(f"forward {number}")
            loss.backward()
            self.reach(f"backward {number}")
            optimizer.step()
        return {"train_loss": loss.item()}

    def reach(self, moment):
        if self.strike == (self.global_step, moment):
            self._lockstep.sync._channel._messages.close()
            raise Dies


class OneLoop(TwoSteps):
    """After an interruption the whole call begins anew."""

    def train_epoch(self, iterator, info):
        for batch in iterator:
            self.train_batch(batch, {})
        return {"train_loss": 0.0}


class CatchesErrors(TwoSteps):
    """Goes on after a `RuntimeError`, as loops do for a batch that does not fit in memory."""

    def train_batch(self, batch, batch_info):
        try:
            return super().train_batch(batch, batch_info)
        except RuntimeError:
            return {"train_loss": float("nan")}


def one_process(steps):
    model = reset(mlp(), seed=7)
    optimizers = [
        torch.optim.Adam(model[0].parameters(), lr=0.02),
        torch.optim.SGD(model[2].parameters(), lr=0.05, momentum=0.9),
    ]
    for step in range(steps):
        rows = slice(step % 2 * BATCH, (step % 2 + 1) * BATCH)
        for optimizer in optimizers:
            optimizer.zero_grad()
            squared(model)(X[rows], Y[rows]).backward()
            optimizer.step()
    return weights([model])


class Generation:
    """A meeting place and a server for `size` workers, and their calls, all at once."""

    def __init__(self, number, size, before=None):
        timeout = timedelta(seconds=20)
        store = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        earlier = None if before is None else before.server
        self.server = ParameterServer(
            "127.0.0.1", size, b"%d secret" % number, 20.0, predecessor=earlier
        )
        self._serving = threading.Thread(target=self.server.serve)
        self._serving.start()
        self._store = store
        self.rendezvous = Rendezvous(
            "127.0.0.1",
            store.port,
            generation=number,
            backend="gloo",
            one_node=True,
            timeout_s=20.0,
            as_default=False,
            server_address=self.server.address,
        )

    def end(self):
        self.server.stop()
        self._serving.join()


def all_at_once(workers, body):
    results = [None] * len(workers)

    def one(rank):
        try:
            results[rank] = body(rank, workers[rank])
        except BaseException as error:
            workers[rank].leave()
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def started(operator_cls, size):
    options = Options(sync="parameter_server")
    spec = WorkerSpec(operator_cls, {BATCH_SIZE: BATCH}, size, size, seed=0, options=options)
    workers = [Worker(spec, rank, rank) for rank in range(size)]
    generation = Generation(0, size)
    starts = all_at_once(workers, lambda rank, worker: worker.start(generation.rendezvous))
    assert all(isinstance(each, StartReport) for each in starts), starts
    return workers, generation


@pytest.mark.parametrize("moment", ["forward 0", "backward 0", "forward 1", "backward 1"])
@pytest.mark.parametrize(
    ("operator_cls", "victim"),
    [
        (TwoSteps, 0),
        (OneLoop, 1),
        (CatchesErrors, 1),
        pytest.param(TwoSteps, 1, marks=pytest.mark.slow),
        pytest.param(OneLoop, 0, marks=pytest.mark.slow),
    ],
)
def test_the_run_goes_on_with_those_that_are_left(operator_cls, moment, victim, monkeypatch):
    # Not set and taken away by several threads of one process.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    workers, first = started(operator_cls, 2)
    all_at_once(workers, lambda rank, worker: worker.train(LoopRequest("train", 2, False, {})))
    workers[victim].operator.strike = (3, moment)
    left = workers[1 - victim]
    request = LoopRequest("train", 2, False, {})
    results = all_at_once(workers, lambda rank, worker: worker.train(request))
    assert isinstance(results[victim], Dies)
    survivor = leave_broken_group(left, request)
    first.end()
    second = Generation(1, 1, before=first)
    join(left, Formation(second.rendezvous, (left.number,), source=0, stale=(), local_ranks=(0,)))
    begun = survivor.progress.steps
    left.train(replace(request, interrupted_at=survivor.progress))
    assert left.operator.global_step == 4
    assert begun == (0 if operator_cls is OneLoop else 1)
    left.train(LoopRequest("train", STEPS - 4, False, {}))
    assert_same(weights([left.operator.model]), one_process(STEPS))
    for worker in workers:
        worker.stop()
    second.end()


def test_the_copies_of_verify_have_the_local_rank_of_the_new_generation(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    local_ranks = []

    class Notes(TwoSteps):
        def setup(self, config):
            super().setup(config)
            local_ranks.append(self.local_rank)

    (lost, left), first = started(Notes, 2)
    lost.stop()
    leave_broken_group(left, None)
    first.end()
    second = Generation(1, 1, before=first)
    join(left, Formation(second.rendezvous, (left.number,), source=0, stale=(), local_ranks=(0,)))
    local_ranks.clear()
    verify(left, 1)
    assert local_ranks == [0, 0]
    left.stop()
    second.end()
