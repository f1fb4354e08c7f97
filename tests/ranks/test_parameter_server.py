# SPDX-License-Identifier: Apache-2.0
"""A server steps for N ranks: gradients and weights are those of one process."""

import copy

import pytest

from harness import assert_equal_on_all_ranks, assert_same
from ranks.programs import PROGRAMS, Accumulated, AccumulatedOntoZeros, prepared
from ranks.served import OnServer, serve_ranks
from ranks.test_replicate_exact import SHARES, weights
from ranks.worlds import OneProcess


def compare(program, shares, *, way, cap_mb):
    oracle = OneProcess(prepared(program))
    program.run(oracle)
    replicas = [prepared(program) for _ in shares]

    def one_rank(group, address):
        modules = replicas[group.rank]
        world = OnServer(modules, group, address, shares, way=way, cap_mb=cap_mb)
        try:
            copy.deepcopy(program).run(world)
        finally:
            world.end()
        return world.seen, weights(modules)

    results = serve_ranks(len(shares), one_rank)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    for step, true in enumerate(oracle.seen):
        assert_equal_on_all_ranks([seen[step] for seen, _ in results])
        assert_same(results[0][0][step], true)
    assert len(results[0][0]) == len(oracle.seen)
    assert_equal_on_all_ranks([after for _, after in results])
    assert_same(results[0][1], weights(oracle.modules))


@pytest.mark.sampled
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_one_process(program, shares):
    compare(program(), shares, way="weighted", cap_mb=25 if shares == (0.5, 0.5) else 1e-4)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_with_plain_backwards(program):
    compare(program(), SHARES["empty_first"], way="plain", cap_mb=25)


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("program", [Accumulated, AccumulatedOntoZeros])
def test_accumulation_divides_once_by_all_weights(program, shares):
    compare(program(), shares, way="weighted", cap_mb=25)
