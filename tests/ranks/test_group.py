# SPDX-License-Identifier: Apache-2.0
"""The explicit group: its collectives, a rank alone, and what a lost peer looks like."""

import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

from harness import outcomes, run_ranks
from lockstep import reduction_context
from lockstep.errors import ConfigurationError, PeerLostError
from lockstep.group import Group, resolve_group
from lockstep.sync import replicate
from lockstep.tensor_stash import TensorStash


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size):
    def body(group):
        assert (group.size, group.is_alone) == (size, False)
        total = torch.tensor([group.rank + 1.0])
        pending = group.all_reduce(total)
        pending.wait()
        pending.wait()
        largest = torch.tensor([group.rank])
        group.all_reduce(largest, dist.ReduceOp.MAX).wait()
        source = torch.tensor([group.rank * 10])
        group.broadcast(source, source=1)
        rows = group.all_gather(torch.tensor([group.rank, -group.rank]))
        said = group.exchange({"rank": group.rank, "names": ["ä"] * group.rank})
        return total.item(), largest.item(), source.item(), torch.stack(rows).tolist(), said

    for total, largest, source, rows, said in run_ranks(size, body):
        assert total == size * (size + 1) / 2
        assert largest == size - 1
        assert source == 10
        assert rows == [[rank, -rank] for rank in range(size)]
        assert said == [{"rank": rank, "names": ["ä"] * rank} for rank in range(size)]


def test_what_is_exchanged_may_be_long_on_one_rank_alone():
    """Short values travel in one message, whose room these go up to, beyond, and back."""
    lengths = [0, 500, 502, 503, 504, 5000, 1]

    def body(group):
        return [group.exchange("x" * (length * (group.rank == 1))) for length in lengths]

    for said in run_ranks(3, body):
        assert said == [["", "x" * length, ""] for length in lengths]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_small_sums_and_large_ones(size):
    """By a gather or an all-reduce: the same bits on every rank, several in flight at once."""
    lengths = (1, 2, 1000, 30_000, 70_000, 300_000)

    def body(group):
        generator = torch.Generator().manual_seed(group.rank)
        sent = [torch.randn(length, generator=generator) for length in lengths]
        sums = [tensor.clone() for tensor in sent]
        pending = [group.all_reduce(tensor) for tensor in sums]
        for one in pending:
            one.wait()
            one.wait()
        return sent, sums

    results = run_ranks(size, body)
    for place in range(len(lengths)):
        true = torch.stack([sent[place].double() for sent, _ in results]).sum(0)
        for _, sums in results:
            assert torch.equal(sums[place], results[0][1][place])
            assert torch.allclose(sums[place].double(), true, atol=1e-5)


def test_who_has_waited_owns_the_tensors_alone():
    """A thread of gloo's that held one still would need the interpreter when the process ends."""

    def body(group):
        held = []
        for _ in range(600):
            mine, everyone = torch.ones(3), torch.empty(6)
            total, one = torch.ones(3), torch.ones(1)
            group.all_gather_into(everyone, mine)
            rows = group.all_gather(mine)
            group.all_reduce(total).wait()
            group.all_reduce(one).wait()
            held += [tensor._use_count() for tensor in (mine, everyone, total, one, *rows)]
        return sum(count > 1 for count in held)

    # Without the wait several of 3600; once the thread may have lost the processor for too long.
    assert max(run_ranks(2, body)) <= 1


def test_while_it_is_lent_a_tensor_has_an_owner_besides_python_and_the_borrower():
    """So that the borrower is not the last of them when it lets go, and needs no interpreter."""
    tensor, shared = torch.ones(3), torch.ones(3)
    view = shared[:2]
    stash = TensorStash(([tensor], (shared, 5)))
    assert (tensor._use_count(), shared._use_count()) == (2, 2)
    stash.wait_released()
    assert (tensor._use_count(), shared._use_count()) == (1, 2)
    assert view.tolist() == [1, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_rows(size):
    def body(group):
        mine = torch.full((2, 3), float(group.rank))
        everyone = torch.empty(2 * size, 3)
        group.all_gather_into(everyone, mine)
        part = torch.empty(2, 3)
        group.reduce_scatter(part, everyone * (group.rank + 1))
        total = torch.tensor([group.rank + 1.0])
        group.reduce(total, 1).wait()
        heard = group.monitored_all_gather([group.rank, -float("inf")])
        return everyone[::2, 0].tolist(), part.unique().tolist(), total.item(), heard

    sum_of_ranks = size * (size + 1) / 2
    for rank, (everyone, part, total, heard) in enumerate(run_ranks(size, body)):
        assert everyone == list(range(size))
        assert part == [rank * sum_of_ranks]
        assert rank != 1 or total == sum_of_ranks
        assert heard == [[other, -float("inf")] for other in range(size)]


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), (3, 2, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_reduce_scatter_sums_what_all_ranks_have_sent(shape, dtype):
    def body(group):
        received = torch.full(shape, 7, dtype=dtype)
        group.reduce_scatter(received, sent[group.rank])
        return received

    # Small integers: their sums have no rounding in any dtype.
    random = torch.Generator().manual_seed(0)
    sent = torch.randint(-9, 9, (3, 3 * shape[0], *shape[1:]), generator=random).to(dtype)
    expected = sent.sum(0).to(dtype).chunk(3) if shape[0] else [sent[0]] * 3
    for part, sum_of_rows in zip(run_ranks(3, body), expected, strict=True):
        assert part.dtype == dtype
        assert torch.equal(part, sum_of_rows)


def test_a_roll_call_names_who_is_missing_and_lets_the_group_go():
    def body(group):
        if group.rank in (1, 3):
            released.wait(20)
            return None
        try:
            with pytest.raises(PeerLostError, match="did not come") as caught:
                group.monitored_all_gather([1.0])
            gone = weakref.ref(group._process_group)
            group.close()
            gc.collect()
            assert gone() is None
            return caught.value
        finally:
            finished.append(group.rank)
            if len(finished) == 2:
                released.set()

    released, finished = threading.Event(), []
    results = outcomes(4, body, timeout_s=3.0)
    # The first to give up has heard from all others; the second may see its connection closed.
    assert any("rank 1, 3 did not come" in str(result) for result in results)


def test_a_rank_alone_communicates_with_itself():
    group = resolve_group(None)
    assert (group.rank, group.size, group.is_alone) == (0, 1, True)
    value = torch.tensor([3.0])
    group.all_reduce(value).wait()
    group.broadcast(value)
    assert group.all_gather(value) == [value]
    assert group.exchange([1, "a"]) == [[1, "a"]]
    assert group.monitored_all_gather([1.0]) == [[1.0]]
    group.reduce(value, 0).wait()
    for move in (group.all_gather_into, group.reduce_scatter):
        moved = torch.empty(1)
        move(moved, value)
        assert moved == value
    assert resolve_group(group) is group


def test_a_closed_group_refuses_everything():
    def body(group):
        gone = weakref.ref(group._process_group)
        group.close()
        group.close()
        gc.collect()
        assert gone() is None
        value = torch.zeros(1)
        for call in (
            lambda: group.all_reduce(value),
            lambda: group.broadcast(value),
            lambda: group.all_gather(value),
            lambda: group.all_gather_into(value, value),
            lambda: group.reduce(value, 0),
            lambda: group.reduce_scatter(value, value),
            lambda: group.monitored_all_gather([1.0]),
            lambda: group.exchange(1),
        ):
            with pytest.raises(PeerLostError, match="closed"):
                call()

    run_ranks(2, body)
    alone = Group(None)
    alone.close()
    with pytest.raises(PeerLostError, match="closed"):
        alone.exchange(1)


def test_a_group_that_was_given_up_refuses_what_follows_and_what_had_not_come():
    """Of NCCL's collectives, whose `wait` says nothing of an abort, most of all."""

    def body(group):
        value, confirmed = torch.zeros(1), torch.zeros(1)
        group.all_reduce(confirmed).wait()
        group.confirm()
        pending = group.all_reduce(value)
        group.give_up()
        group.confirm()
        with pytest.raises(PeerLostError, match="all_reduce over a group that was given up"):
            pending.wait()
        with pytest.raises(PeerLostError, match="a step over a group that was given up"):
            group.confirm()
        with pytest.raises(PeerLostError, match="all_gather over a group that was given up"):
            group.all_gather(value)
        with pytest.raises(PeerLostError, match="given up"):
            group.monitored_all_gather([1.0])

    run_ranks(2, body)


@pytest.mark.parametrize("call", ["broadcast", "exchange", "monitored_all_gather"])
def test_a_step_is_refused_for_good_where_a_collective_has_failed(call):
    """A loop may have caught the error, as `except RuntimeError` does."""

    def body(group):
        group.exchange(None)
        if group.rank == 1:
            raise KeyboardInterrupt
        value = [1.0] if call == "monitored_all_gather" else torch.zeros(4)
        with pytest.raises(PeerLostError):
            for _ in range(50):
                if call == "broadcast":
                    group.broadcast(value, source=1)
                else:
                    getattr(group, call)([1.0])
        for _ in range(2):
            with pytest.raises(PeerLostError, match="a step over a group"):
                group.confirm()

    first, _ = outcomes(2, body)
    assert first is None


def test_a_step_is_refused_for_good_where_a_collective_was_refused():
    def body(group):
        group.give_up()
        group.confirm()  # the collectives before were complete
        with pytest.raises(PeerLostError):
            group.exchange(1)
        for _ in range(2):
            with pytest.raises(PeerLostError, match="a step over a group"):
                group.confirm()

    run_ranks(2, body)


def test_an_optimizer_takes_no_sums_of_a_group_that_was_given_up():
    def body(group):
        model = models[group.rank]
        sync = replicate(model, group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync.backward(model(torch.ones(1, 2)).sum(), weight=1)
        before = model.weight.detach().clone()
        group.give_up()
        with pytest.raises(PeerLostError, match="given up"):
            optimizer.step()
        assert torch.equal(model.weight, before)
        sync.detach()

    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    run_ranks(2, body)


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "all_gather", "exchange"])
def test_a_lost_peer_is_a_peer_lost_error(call):
    def body(group):
        # Until both are connected there is nothing to lose: forming the group would fail instead.
        group.exchange(None)
        if group.rank == 1:
            raise KeyboardInterrupt  # a rank that ends closes its group
        value = torch.zeros(4)
        for _ in range(50):
            if call == "exchange":
                group.exchange([1])
            elif call == "broadcast":
                group.broadcast(value, source=1)
            elif call == "all_reduce":
                group.all_reduce(value).wait()
            else:
                group.all_gather(value)

    lost, _ = outcomes(2, body)
    assert isinstance(lost, PeerLostError)
    assert isinstance(lost.__cause__, RuntimeError)
    assert "rank 0 of 2" in str(lost)


def test_a_tensor_that_no_backend_sends_is_no_lost_peer():
    """As that of a model on the CPU after `init_process_group("nccl")`: here CUDA alone has one."""

    def body(group):
        process_group = dist.ProcessGroup(dist.HashStore(), group.rank, group.size)
        kind = dist.ProcessGroup.BackendType.GLOO
        process_group._register_backend(torch.device("cuda"), kind, group._process_group)
        for_cuda = Group(process_group)
        value = torch.zeros(2)
        for call in (
            lambda: for_cuda.all_reduce(value),
            lambda: for_cuda.broadcast(value),
            lambda: for_cuda.all_gather(value),
            lambda: for_cuda.exchange(1),
            lambda: replicate(torch.nn.Linear(2, 1), group=for_cuda),
        ):
            with pytest.raises(ConfigurationError, match=r"on cpu(.|\n)*model\.to\(device\)"):
                call()
        process_group._register_backend(torch.device("cpu"), kind, group._process_group)
        for_cuda.broadcast(value)
        return for_cuda.exchange(group.rank)

    assert run_ranks(2, body) == [[0, 1], [0, 1]]


def test_the_active_reduction_nests_and_is_seen_by_autograds_threads():
    from threading import Thread

    outer, inner = (
        reduction_context.ReductionContext(Group(None), 3.0),
        reduction_context.ReductionContext(Group(None)),
    )
    seen = []
    assert reduction_context.active() is None
    with reduction_context.activate(outer):
        with reduction_context.activate(inner):
            assert reduction_context.active() is inner
            thread = Thread(target=lambda: seen.append(reduction_context.active()))
            thread.start()
            thread.join()
        assert reduction_context.active() is outer
    assert reduction_context.active() is None
    assert seen == [inner]


@pytest.mark.parametrize("numbers", [3, 1 << 18])
def test_a_collective_that_has_failed_before_it_is_waited_for(numbers):
    def body(group):
        if group.rank == 1:
            return
        pending = group.all_reduce(torch.ones(numbers))
        while not pending._work.is_completed():
            threading.Event().wait(0.01)
        with pytest.raises(PeerLostError, match="all_reduce failed"):
            pending.wait()

    run_ranks(2, body)
