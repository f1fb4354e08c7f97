# SPDX-License-Identifier: Apache-2.0
"""A rank is lost, the others form another group, and the same store goes on with them."""

import threading

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from harness import assert_equal_on_all_ranks, assert_same, cut, outcomes, reset
from lockstep.errors import PeerLostError
from lockstep.sync import ParameterServer, ParameterServerSync
from ranks.programs import X, Y, mlp, squared
from ranks.test_replicate_exact import weights

STEPS = 6
STRUCK = 3


class Dies(Exception):
    """A rank is killed: its connections close, and it reads nothing any more."""


class Counting(torch.optim.Adam):
    """Counts its steps, in an attribute and in marks of parameters; scales weights by that."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.steps, self.scale, self.begun = 0, 1.0, 1.0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for param in self.param_groups[0]["params"]:
            param.steps = self.steps
        super().step()
        for param in self.param_groups[0]["params"]:
            param.mul_(1 + 0.01 * self.steps * self.scale * self.begun)


class Rank:
    """One rank's model and two optimizers, in a loop that clamps weights, with a scheduler.

    The second optimizer steps after a backward of its own.
    """

    def __init__(self):
        self.model = reset(mlp(), seed=7)
        first, _, last = self.model
        self.optimizers = [
            Counting(first.parameters(), lr=0.02),
            torch.optim.SGD(last.parameters(), lr=0.05, momentum=0.9),
        ]
        self.scheduler = StepLR(self.optimizers[1], 2, gamma=0.5)
        self.committed = 0
        self.before = self.sync = None

    def state(self):
        settings = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        values = [param.detach().clone() for param in self.model.parameters()]
        own = self.scheduler.state_dict(), self.optimizers[0].scale, self.committed
        return values, settings, *own

    def go_to(self, state):
        values, settings, schedule, self.optimizers[0].scale, self.committed = state
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), values, strict=True):
                param.copy_(value)
                param.grad = None  # of a step that has not happened: each rank's own
        for optimizer, rate in zip(self.optimizers, settings, strict=True):
            optimizer.param_groups[0]["lr"] = rate
        self.scheduler.load_state_dict(dict(schedule))

    def train(self, sync, part, strike=lambda moment: None):
        while self.committed < STEPS:
            self.before = self.state()
            sync.set_undo_point(self.committed)
            for number, optimizer in enumerate(self.optimizers):
                optimizer.zero_grad()
                self.optimizers[0].begun = 1 / (1 + self.committed)
                strike(f"forward {number}")
                loss = squared(self.model)(X[part] * (self.committed + 1), Y[part])
                # Read here, behind whichever steps were undone.
                counted = getattr(self.model[0].bias, "steps", 0)
                loss = loss * (1 + self.optimizers[0].steps) * (1 + counted)
                sync.backward(loss, weight=len(X[part]))
                strike(f"backward {number}")
                optimizer.step()
            with torch.no_grad():
                for param in self.model.parameters():
                    param.data.clamp_(-0.35, 0.35)
            self.scheduler.step()
            self.committed += 1
            self.optimizers[0].scale = 1.5**self.committed  # before the next step begins


class OneProcess:
    def backward(self, loss, weight):
        loss.backward()

    def set_undo_point(self, step):
        """There is nobody who could be lost."""


def killed_at(moment, rank, sync):
    def strike(reached):
        if rank.committed != STRUCK or reached != moment.removesuffix(", sent"):
            return
        channel = sync._channel
        if moment.endswith("sent"):
            # The server makes the step; this rank never reads the answer.
            optimizer = int(reached[-1])
            request = sync._served[optimizer]._request("step")
            request.body.with_gradient, gradients = _gradients(sync, optimizer)
            request.tensors = [*request.tensors, *gradients]
            channel._messages.send(request)
        channel._messages.close()
        raise Dies

    return strike


def _gradients(sync, optimizer):
    served = sync._served[optimizer]
    params = served.optimizer.param_groups[0]["params"]
    return [served._number_of[id(p)] for p in params], [p.grad for p in params]


def generation(ranks, server, *, resume_step=None, moment=None, victim=None):
    """What becomes of each of `ranks`; None for one that trained to the end."""
    thread = threading.Thread(target=server.serve)
    thread.start()
    parts = cut(12, [12 // len(ranks)] * len(ranks))

    def one_rank(group):
        rank = ranks[group.rank]
        sync = ParameterServerSync(
            [rank.model],
            rank.optimizers,
            group,
            server.address,
            resume_step=resume_step,
            predecessor=rank.sync,
        )
        rank.sync = sync
        strike = killed_at(moment, rank, sync) if group.rank == victim else lambda reached: None
        try:
            rank.train(sync, parts[group.rank], strike)
        finally:
            group.close()
            sync.leave_group()

    results = outcomes(len(ranks), one_rank)
    thread.join()
    return results


@pytest.mark.parametrize(
    "victim", [0, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (1, 2))]
)
@pytest.mark.parametrize(
    "moment",
    ["forward 0", "backward 0", "backward 0, sent", "forward 1", "backward 1", "backward 1, sent"],
)
def test_no_step_is_lost_and_none_is_made_twice(moment, victim):
    truth = Rank()
    truth.train(OneProcess(), slice(None))
    ranks = [Rank() for _ in range(3)]
    server = ParameterServer("127.0.0.1", 3, b"one secret", 20.0)
    results = generation(ranks, server, moment=moment, victim=victim)
    assert isinstance(results[victim], Dies)
    left = [rank for rank in ranks if rank is not ranks[victim]]
    assert all(isinstance(r, PeerLostError) for r in results if not isinstance(r, Dies)), results
    for rank in left:
        rank.go_to(rank.before)
    furthest = max(left, key=lambda rank: rank.committed)
    for rank in left:
        rank.go_to(furthest.state())
    after = ParameterServer("127.0.0.1", 2, b"another secret", 20.0, predecessor=server)
    assert generation(left, after, resume_step=furthest.committed) == [None, None]
    assert_equal_on_all_ranks([weights([rank.model]) for rank in left])
    assert_same(weights([left[0].model]), weights([truth.model]))
