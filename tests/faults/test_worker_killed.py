# SPDX-License-Identifier: Apache-2.0
"""A worker's process dies in the middle of backward; the survivors go on without it.

Everything that recovery will need of a worker: the broken group really closes, another one
forms in the same processes, and the step that did not happen is computed again, by fewer
workers, to the weights of a run that nobody disturbed.
"""

import gc
import multiprocessing
import os
import time
import traceback
import weakref
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness import reset, rows
from lockstep import TrainingOperator
from lockstep.errors import PeerLostError
from lockstep.keys import BATCH_SIZE
from lockstep.operator import Options
from lockstep.worker import LoopRequest, Rendezvous, Worker, WorkerSpec, failed_outcome

WORKERS, ROWS, GLOBAL_BATCH = 3, 25, 12
# The second step, which has rows for everybody, is the one that does not happen; the third has
# rows for one worker alone.
BEFORE, AFTER = 1, 4
FEATURES, TARGETS = rows(ROWS, 4, seed=1), rows(ROWS, 3, seed=2)


def model():
    return reset(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), 7)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


class Regression(TrainingOperator):
    def setup(self, config):
        net = model()
        self.model, self.optimizer, self.criterion = self.register(
            models=net, optimizers=sgd(net), criterion=nn.MSELoss()
        )
        loader = DataLoader(TensorDataset(FEATURES, TARGETS), config[BATCH_SIZE])
        self.register_data(train_loader=loader)


# Buckets of one parameter: those of the last layer have left when the first layer's gradient
# comes, which is where the process dies.
SPEC = WorkerSpec(
    Regression,
    {BATCH_SIZE: GLOBAL_BATCH},
    num_workers=WORKERS,
    num_shards=WORKERS,
    seed=0,
    options=Options(bucket_cap_mb=1e-6),
)


def undisturbed():
    net = model()
    optimizer = sgd(net)
    starts = list(range(0, ROWS, GLOBAL_BATCH))
    for step in range(BEFORE + AFTER):
        start = starts[step % len(starts)]
        part = slice(start, start + GLOBAL_BATCH)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(FEATURES[part]), TARGETS[part]).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def num_sockets():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def closes_down_to(expected):
    """Gloo closes sockets on a thread of its own."""
    deadline = time.monotonic() + 20
    while num_sockets() > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return num_sockets() <= expected


def is_freed(reference):
    """The last to hold a broken group is the thread that closes it."""
    deadline = time.monotonic() + 10
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return reference() is None


def live(rank, victim, port, pipe):
    """One process: its worker, and if it survives, the worker that it becomes."""
    try:
        pipe.send(_live(rank, victim, port))
    except BaseException:
        pipe.send(traceback.format_exc())


def _live(rank, victim, port):
    torch.set_num_threads(1)
    # What only the cycle collector would free is not freed: nothing may depend on when it runs.
    gc.disable()
    sockets = num_sockets()
    rendezvous = Rendezvous("127.0.0.1", port, 0, "gloo", one_node=True, timeout_s=30)
    worker = Worker(SPEC, rank, rank)
    worker.start(rendezvous)
    worker.train(LoopRequest("train", BEFORE, False, {}))
    broken = weakref.ref(dist.group.WORLD)
    assert broken() is not None
    if rank == victim:
        # In backward: a hook on the parameter would be run when the gradient has been reduced.
        weight = worker.operator.model[0].weight
        reached = weight.view_as(weight).grad_fn.next_functions[0][0]
        reached.register_prehook(lambda _: os._exit(1))
    # As an engine's actor does: let go of the group, then keep of the error what can travel.
    try:
        worker.train(LoopRequest("train", AFTER, False, {}))
    except BaseException as error:
        worker.leave()
        outcome = failed_outcome(rank, error)
    else:
        return "nobody died"
    assert outcome.peer_lost, outcome.notes
    assert isinstance(outcome.exception(), PeerLostError)
    assert is_freed(broken), "somebody still refers to the broken group"
    assert not dist.is_initialized()
    assert closes_down_to(sockets), f"{num_sockets() - sockets} sockets are still open"

    state = worker.state_dict()
    worker.stop()
    assert state["global_step"] == BEFORE
    survivors = [each for each in range(WORKERS) if each != victim]
    successor = Worker(replace(SPEC, num_workers=len(survivors)), survivors.index(rank), rank)
    successor.start(replace(rendezvous, generation=1))
    try:
        successor.load_state(state)
        successor.train(LoopRequest("train", AFTER, False, {}))
        weights = [p.detach().flatten() for p in successor.operator.model.parameters()]
        return torch.cat(weights).tolist(), successor.operator.global_step
    finally:
        successor.stop()


@pytest.mark.parametrize("victim", [0, WORKERS - 1])
def test_survivors_replay_the_step_in_a_new_group(victim):
    # Forked from a process that has imported torch, once for all of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.worker", "torch._dynamo"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(WORKERS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=live, args=(rank, victim, store.port, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        expected = undisturbed()
        for rank, pipe in enumerate(pipes):
            if rank == victim:
                continue
            assert pipe.poll(40), f"rank {rank} hangs"
            answer = pipe.recv()
            assert isinstance(answer, tuple), f"rank {rank}: {answer}"
            weights, steps = answer
            assert steps == BEFORE + AFTER
            assert (torch.tensor(weights, dtype=torch.float64) - expected).abs().max() < 1e-12
        processes[victim].join(10)
        assert processes[victim].exitcode == 1
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            if process.is_alive():
                process.join(5)
            process.kill()
            process.join()
            process.close()
            pipe.close()
