# SPDX-License-Identifier: Apache-2.0
"""Sums within hosts first and then between them: the sum, the same bits, beside other collectives.

Ranks are threads, and their hosts are names: what crosses a link between hosts is measured in
`tests/procs/test_bytes_between_hosts.py`.
"""

import threading
import time

import pytest
import torch

from harness import outcomes, run_ranks
from lockstep.errors import PeerLostError
from lockstep.group import Group
from lockstep.hierarchical_sum import HostGrid, host_id
from ranks.programs import PROGRAMS
from ranks.test_replicate_exact import SHARES, compare

LARGE = 400_000
"""Doubles in a tensor that goes over the hosts, and in more than one piece."""


def drawn(rank, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("hosts", "rows"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("aabbcc", ((0, 1), (2, 3), (4, 5))),
        ("aaa", None),  # one host
        ("abc", None),  # one rank each
        ("aab", None),  # another number on each
    ],
)
def test_a_grid_has_equally_many_ranks_on_each_host(hosts, rows):
    grid = HostGrid.of(hosts)
    assert (None if grid is None else grid.rows) == rows


def test_a_host_is_what_the_variable_of_nccl_says(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    found = host_id()
    assert found
    assert found == host_id()
    monkeypatch.setenv("NCCL_HOSTID", "here")
    assert host_id() == "here"


@pytest.mark.sampled
@pytest.mark.parametrize("hosts", ["aabb", "abab", "aabbcc", "aaabbb"])
@pytest.mark.parametrize("size", [LARGE, LARGE + 7, 1_500_001])
def test_the_sum_has_the_same_bits_on_every_rank(hosts, size):
    true = sum(drawn(rank, size) for rank in range(len(hosts)))

    def body(group):
        group.use_hosts(hosts, least_bytes=0)
        totals = [drawn(group.rank, size), drawn(group.rank, size).view(1, -1)]
        for pending in [group.all_reduce(total) for total in totals]:
            pending.wait()
        return totals

    results = run_ranks(len(hosts), body)
    for first, second in results:
        torch.testing.assert_close(first, true, rtol=0, atol=1e-12)
        assert torch.equal(first, results[0][0])
        assert torch.equal(second.view(-1), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_of_every_dtype(dtype):
    def body(group):
        group.use_hosts("aabb", least_bytes=0)
        total = torch.full((1 << 20,), group.rank + 1, dtype=dtype)
        group.all_reduce(total).wait()
        return total

    for total in run_ranks(4, body):
        assert torch.equal(total, torch.full_like(total, 10))


def test_other_collectives_may_run_before_or_after_it_on_each_rank():
    def body(group):
        group.use_hosts("aabb", least_bytes=0)
        total, other = drawn(group.rank, LARGE), torch.ones(LARGE, dtype=torch.float64)
        pending = group.all_reduce(total) if group.rank % 2 else None
        group.broadcast(other)
        pending = pending or group.all_reduce(total)
        group.broadcast(other)
        pending.wait()
        return total, other

    true = sum(drawn(rank, LARGE) for rank in range(4))
    for total, other in run_ranks(4, body):
        torch.testing.assert_close(total, true, rtol=0, atol=1e-12)
        assert torch.equal(other, torch.ones_like(other))


def test_groups_over_one_process_group_share_their_threads():
    """Their sums pair up in the order in which the ranks start them."""
    generator = [torch.Generator().manual_seed(number) for number in range(4)]

    def body(group):
        others = [Group(group._process_group) for _ in range(2)]
        for each in (group, *others):
            each.use_hosts("aabb", least_bytes=0)
        sums = [torch.full((LARGE,), float(number), dtype=torch.float64) for number in range(3)]
        for _ in range(5):
            pending = [each.all_reduce(s) for each, s in zip((group, *others), sums, strict=True)]
            time.sleep(torch.rand((), generator=generator[group.rank]).item() / 100)
            for one in pending:
                one.wait()
        num_threads = len(threads_of_sums())
        for each in others:
            each.close()
        return [float(s[0]) for s in sums], num_threads

    for sums, num_threads in run_ranks(4, body):
        assert sums == [0.0, 4.0**5, 2 * 4.0**5]
        assert num_threads <= 3 * 4


def test_it_counts_as_one_collective():
    def body(group):
        group.use_hosts("aabb", least_bytes=0)
        device = torch.device("cpu")
        before = group.started.on(device)
        group.all_reduce(drawn(0, LARGE)).wait()
        group.all_reduce(drawn(0, 3)).wait()
        after = group.started.on(device)
        group.close()
        return after - before, group.started.on(device) - after

    assert run_ranks(4, body) == [(2, 0)] * 4


@pytest.mark.sampled
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_of_one_process(program, cap_mb):
    compare(program(), SHARES["four"], way="weighted", cap_mb=cap_mb, hosts="abab")


def threads_of_sums():
    return [one for one in threading.enumerate() if one.name.startswith("lockstep-all-reduce")]


@pytest.mark.parametrize("lost", range(4))
def test_a_rank_that_leaves_ends_the_waits_of_the_others(lost):
    def body(group):
        group.use_hosts("aabb", least_bytes=0)
        group.all_reduce(drawn(group.rank, LARGE)).wait()
        if group.rank == lost:
            return 0.0
        began = time.monotonic()
        pending = [group.all_reduce(drawn(group.rank, LARGE)) for _ in range(3)]
        for one in pending:
            with pytest.raises(PeerLostError, match="all_reduce failed"):
                one.wait()
        with pytest.raises(PeerLostError):
            group.confirm()
        return time.monotonic() - began

    assert max(run_ranks(4, body)) < 10  # the group's timeout is 20 seconds


def test_a_rank_that_raises_with_a_sum_on_its_way_frees_the_others():
    def body(group):
        group.use_hosts("aabb", least_bytes=0)
        pending = group.all_reduce(drawn(group.rank, LARGE))
        if group.rank == 2:
            raise ArithmeticError("of rank 2")
        pending.wait()
        group.all_reduce(drawn(group.rank, LARGE)).wait()

    errors = outcomes(4, body)
    assert isinstance(errors.pop(2), ArithmeticError)
    assert all(isinstance(error, PeerLostError) for error in errors)


def test_its_threads_end_with_the_group():
    def body(group):
        group.use_hosts("aabb", least_bytes=0)
        group.all_reduce(drawn(group.rank, LARGE)).wait()
        return len(threads_of_sums())

    assert min(run_ranks(4, body)) >= 3
    for one in threads_of_sums():
        one.join(5)
        assert not one.is_alive()
