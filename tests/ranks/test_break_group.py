# SPDX-License-Identifier: Apache-2.0
"""A worker's group is broken from another thread."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.ray.operators import DefaultLoop

import lockstep
from harness import run_ranks, side_by_side
from lockstep.errors import PeerLostError
from lockstep.keys import BATCH_SIZE
from lockstep.worker import LoopRequest, Rendezvous, Worker, leave_broken_group
from lockstep.worker.spec import WorkerSpec

CPU = torch.device("cpu")


class Workers:
    """Some workers, which are threads, and the group of each in the generation that they are in."""

    def __init__(self, operator_cls, size):
        spec = WorkerSpec(operator_cls, {BATCH_SIZE: 10}, num_workers=size, num_shards=size, seed=0)
        self.workers = [Worker(spec, rank, rank) for rank in range(size)]
        self.groups = [None] * size
        self._all, self._stores = threading.Barrier(size), []

    def _place(self, generation):
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        self._stores.append(store)
        return Rendezvous("127.0.0.1", store.port, generation, "gloo", True, 20.0, as_default=False)

    def join_group(self, generation):
        place = self._place(generation)

        def one(rank):
            self.workers[rank].leave()
            self._all.wait(20)
            self.groups[rank] = self.workers[rank].join_group(place, CPU)

        side_by_side(one, len(self.workers))

    def start(self):
        place = self._place(0)
        side_by_side(lambda rank: self.workers[rank].start(place), 2)


@pytest.fixture
def pair(monkeypatch):
    """A function that makes a pair, or more of them; its workers stop in the end."""
    # Not set and taken away by several threads of one process.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    every = []

    def made(operator_cls=DefaultLoop, size=2):
        every.append(Workers(operator_cls, size))
        return every[-1]

    yield made
    for one in every:
        side_by_side(lambda rank, one=one: one.workers[rank].stop(), len(one.workers))


def exchanged(groups):
    """What an exchange brings on each rank: the values, or why not."""
    found = [None, None]

    def one(rank):
        try:
            found[rank] = groups[rank].exchange(rank)
        except PeerLostError as error:
            found[rank] = error

    side_by_side(one, 2)
    return found


def test_a_call_that_comes_late_breaks_no_later_group(pair):
    """It was sent because a peer was lost; by now the others have formed the next group."""
    both = pair()
    both.join_group(0)
    both.join_group(1)
    both.workers[0].break_group(0)
    assert exchanged(both.groups) == [[0, 1], [0, 1]]
    both.workers[0].break_group(1)
    assert all(isinstance(one, PeerLostError) for one in exchanged(both.groups))


def test_waits_in_a_sum_over_hosts_end(pair):
    """Of four ranks one is silent: it sends nothing, and its sockets stay open."""
    four = pair(size=4)
    four.join_group(0)
    found, all_wait = [None] * 4, threading.Barrier(4)

    def one(rank):
        four.groups[rank].use_hosts("abab", least_bytes=0)
        pending = None if rank == 3 else four.groups[rank].all_reduce(torch.ones(1 << 20))
        all_wait.wait(20)
        if rank == 3:
            return
        four.workers[rank].break_group(0)
        began = time.monotonic()
        # What comes first: the backend's error, or a look at whether the group was given up.
        with pytest.raises(PeerLostError, match=r"all_reduce (failed|over a group)"):
            pending.wait()
        found[rank] = time.monotonic() - began

    side_by_side(one, 4)
    assert max(found[:3]) < 10  # the group's timeout is 20 seconds


@pytest.mark.parametrize("hosts", ["", "abab"])
@pytest.mark.parametrize("numbers", [1, 1000, 1 << 20])
def test_a_wait_ends_when_the_group_is_given_up(hosts, numbers):
    """Also where the backend does not say so: its sockets are open here, and a peer is silent."""
    all_wait, may_leave = threading.Barrier(4), threading.Barrier(4)

    def body(group):
        group.use_hosts(hosts, least_bytes=0)
        pending = None if group.rank == 3 else group.all_reduce(torch.ones(numbers))
        all_wait.wait(20)
        if pending is not None:
            giving_up = threading.Timer(0.1, group.give_up)
            giving_up.start()
            began = time.monotonic()
            with pytest.raises(PeerLostError, match="all_reduce over a group that was given up"):
                pending.wait()
            assert time.monotonic() - began < 10  # the group's timeout is 20 seconds
        may_leave.wait(20)

    run_ranks(4, body)


class GivesUpLate(DefaultLoop):
    """The group is given up when the optimizer has stepped, and something else was exchanged."""

    def after_step(self):
        group = self._lockstep.context.group
        group.exchange(0)
        group.give_up()


def test_a_step_is_not_committed_if_the_group_was_given_up_behind_it(pair):
    both = pair(GivesUpLate)
    both.start()
    found = [None, None]

    def one(rank):
        with pytest.raises(PeerLostError, match="a step over a group that was given up") as caught:
            both.workers[rank].train(LoopRequest("train", 1, False, {}))
        found[rank] = caught.value

    side_by_side(one, 2)
    assert all(found)
    assert [worker.operator.global_step for worker in both.workers] == [0, 0]


class CatchesErrors(DefaultLoop):
    """Goes on after a `RuntimeError`, as loops do for a batch that does not fit in memory. The
    loss is computed of all ranks' rows."""

    joint_loss = True

    def compute_loss(self, batch, batch_info):
        rows = self.model(batch[0])
        return self.criterion(rows, batch[1]) + lockstep.gather(rows).square().mean()

    def train_batch(self, batch, batch_info):
        try:
            self.before_batch(batch_info["batch_idx"])
            return super().train_batch(batch, batch_info)
        except RuntimeError:
            return {"train_loss": float("nan")}

    def before_batch(self, number):
        pass


class MeetsBehindTheBackward(CatchesErrors):
    """Gradients are reduced, then the ranks communicate again, as buffers do after a round."""

    def train_batch(self, batch, batch_info):
        try:
            self.optimizer.zero_grad()
            self.compute_loss(batch, batch_info).backward()
            self.before_batch(batch_info["batch_idx"])
            self._lockstep.context.group.exchange(None)
            self.optimizer.step()
        except RuntimeError:
            pass
        return {}


@pytest.mark.parametrize("is_broken_first", [False, True])
@pytest.mark.parametrize("operator_cls", [CatchesErrors, MeetsBehindTheBackward])
def test_a_step_in_which_a_loop_has_caught_the_loss_of_a_rank_is_not_committed(
    pair, operator_cls, is_broken_first
):
    """Nor are those behind it: their batches would count as trained."""
    both = pair(operator_cls)
    both.start()
    first, other = both.workers
    is_gone = threading.Event()

    def end(number):
        if number == 1:
            raise KeyError("the process ends")

    def wait(number):
        if number == 1:
            assert is_gone.wait(20)
            if is_broken_first:  # the driver was quicker than the rank
                first.break_group(0)

    other.operator.before_batch, first.operator.before_batch = end, wait

    def one(rank):
        if rank == 1:
            with pytest.raises(KeyError):
                other.train(LoopRequest("train", 3, False, {}))
            other.leave()
            is_gone.set()
        else:
            with pytest.raises(PeerLostError, match="a step over a group"):
                first.train(LoopRequest("train", 3, False, {}))

    side_by_side(one, 2)
    assert [worker.operator.global_step for worker in both.workers] == [1, 1]
    for worker in both.workers:
        survivor = leave_broken_group(worker, worker.loop_run.request)
        assert survivor.position.steps == survivor.progress.steps == 1


class CatchesErrorsOfItsOwn(CatchesErrors):
    """Its collectives are torch's, of whose failure lockstep does not know."""

    def train_batch(self, batch, batch_info):
        self.before_batch(batch_info["batch_idx"])
        return {}


def test_over_a_group_that_was_broken_no_further_batch_begins(pair):
    both = pair(CatchesErrorsOfItsOwn)
    both.start()

    def one(rank):
        worker = both.workers[rank]
        worker.operator.before_batch = lambda number: number == 1 and worker.break_group(0)
        with pytest.raises(PeerLostError, match="a batch over a group that was given up"):
            worker.train(LoopRequest("train", 4, False, {}))

    side_by_side(one, 2)
    assert [worker.operator.global_step for worker in both.workers] == [2, 2]


class StepsInValidation(DefaultLoop):
    """Its `validate` counts, steps a scheduler and writes to a weight."""

    count = 0

    def setup(self, config):
        super().setup(config)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def train_batch(self, batch, batch_info):
        """Of its own, which may step the scheduler as well."""
        return super().train_batch(batch, batch_info)

    def validate(self, val_iterator, info):
        result = super().validate(val_iterator, info)
        if info.get("fails_on") == self.world_rank:
            raise LookupError
        self.count += 1
        self.scheduler.step()
        with torch.no_grad():
            next(self.model.parameters()).mul_(0.5)
        return result

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


ONE_STEP = LoopRequest("train", 1, False, {})


def changed(worker):
    operator = worker.operator
    (group,) = operator.optimizer.param_groups
    weight = next(operator.model.parameters()).detach().clone()
    return operator.count, operator.scheduler.last_epoch, group["lr"], weight


def test_a_rank_that_was_through_a_validation_goes_back_with_the_one_that_was_not(pair):
    """Both validate again: it would count twice there, and the ranks would drift apart."""
    both = pair(StepsInValidation)
    both.start()

    request = LoopRequest("validation", None, False, {"fails_on": 1})

    def failing(rank):
        if rank == 1:
            with pytest.raises(LookupError):
                both.workers[rank].validate(request)
        else:
            both.workers[rank].validate(request)

    side_by_side(lambda rank: both.workers[rank].train(ONE_STEP), 2)
    *before, weight = changed(both.workers[0])
    side_by_side(failing, 2)
    assert changed(both.workers[0])[:2] == (1, 1)
    for worker in both.workers:
        leave_broken_group(worker, request)
        *numbers, value = changed(worker)
        assert numbers == before
        assert torch.equal(value, weight)


def test_a_rank_that_has_not_begun_a_validation_keeps_what_the_one_before_has_changed(pair):
    """Ctrl-C while the call is sent: the other ranks go back to where it began, and no further."""
    both = pair(StepsInValidation)
    both.start()
    first, second = (LoopRequest("validation", None, False, {}) for _ in range(2))
    side_by_side(lambda rank: both.workers[rank].train(ONE_STEP), 2)
    side_by_side(lambda rank: both.workers[rank].validate(first), 2)
    for worker in both.workers:
        worker.operator.count += 1  # as `apply_all_operators` may
    before = [changed(worker) for worker in both.workers]
    both.workers[0].break_group(0)
    with pytest.raises(PeerLostError):
        both.workers[0].validate(second)
    for worker, (*expected, weight) in zip(both.workers, before, strict=True):
        leave_broken_group(worker, second)
        *numbers, value = changed(worker)
        assert numbers == expected == [2, 1, expected[2]]
        assert torch.equal(value, weight)


def test_copies_of_a_validation_go_with_the_worker(pair):
    """Which outlives its work in the driver's process. Until then a peer may fail."""
    both = pair(StepsInValidation)
    both.start()
    request = LoopRequest("validation", None, False, {})
    side_by_side(lambda rank: both.workers[rank].train(ONE_STEP), 2)
    side_by_side(lambda rank: both.workers[rank].validate(request), 2)
    copies = [each.operator._lockstep.evaluation_writes.copied_elsewhere for each in both.workers]
    assert all(copies)
    side_by_side(lambda rank: both.workers[rank].stop(), 2)
    assert not any(copies)


def test_a_group_beside_the_run_is_broken_with_it(pair):
    """`verify` waits in one: with NCCL nobody is freed where its sockets are shut down."""
    both = pair()
    both.start()
    copies, groups = [None, None], [None, None]

    def one(rank):
        worker = both.workers[rank]
        copies[rank] = worker.make_copy(worker.spec, alone=False)
        copies[rank].build_as_trial(torch.device("cpu"))
        groups[rank] = copies[rank].operator._lockstep.context.group

    side_by_side(one, 2)
    assert exchanged(groups) == [[0, 1], [0, 1]]
    both.workers[0].break_group(0)
    here, there = exchanged(groups)
    assert "given up" in str(here)
    assert isinstance(there, PeerLostError)
    side_by_side(lambda rank: copies[rank].stop(), 2)
