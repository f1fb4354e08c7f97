# SPDX-License-Identifier: Apache-2.0
"""Under DDP, N ranks have the gradients and the weights of one process on the same batch."""

import copy

import pytest

from harness import assert_equal_on_all_ranks, assert_same, gradients, run_ranks
from lockstep.sync.ddp_sync import DDPSync
from ranks.programs import prepared
from ranks.test_replicate_exact import weights
from ranks.worlds import OneProcess, OnRanks
from ranks.wrapped_programs import ACCUMULATING, WRAPPED

SHARES = {
    "alone": (1.0,),
    "even": (0.5, 0.5),
    "uneven": (0.75, 0.25),
    "empty": (1.0, 0.0),
    "three": (0.0, 0.6, 0.4),
}


class OnDDP(OnRanks):
    def __init__(self, modules, group, shares, *, way, cap_mb, ddp_args) -> None:
        self.sync = DDPSync(modules, group, ddp_args=ddp_args, bucket_cap_mb=cap_mb)
        self.plain, self.modules = modules, self.sync.models
        self.group, self.shares, self.way = group, shares, way
        self.seen = []

    def note(self) -> None:
        self.seen.append(gradients(*self.plain))


def compare(program, shares, *, way, cap_mb) -> None:
    oracle = OneProcess(prepared(program))
    program.run(oracle)
    replicas = [prepared(program) for _ in shares]
    ddp_args = getattr(program, "ddp_args", {})

    def one_rank(group):
        modules = replicas[group.rank]
        world = OnDDP(modules, group, shares, way=way, cap_mb=cap_mb, ddp_args=ddp_args)
        try:
            copy.deepcopy(program).run(world)
        finally:
            world.end()
        return world.seen, weights(modules)

    results = run_ranks(len(shares), one_rank)
    for step, true in enumerate(oracle.seen):
        assert_equal_on_all_ranks([seen[step] for seen, _ in results])
        assert_same(results[0][0][step], true)
    assert len(results[0][0]) == len(oracle.seen)
    assert_equal_on_all_ranks([after for _, after in results])
    assert_same(results[0][1], weights(oracle.modules))


@pytest.mark.sampled
@pytest.mark.parametrize("split", SHARES)
@pytest.mark.parametrize("way", ["weighted", "plain", "borrowed"])
@pytest.mark.parametrize("program", WRAPPED, ids=lambda program: program.__name__)
def test_as_one_process(program, way, split):
    # Small buckets for all but the even split: then several are in flight during backward.
    compare(program(), SHARES[split], way=way, cap_mb=25 if split == "even" else 1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("split", SHARES)
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
@pytest.mark.parametrize("program", ACCUMULATING, ids=lambda program: program.__name__)
def test_accumulation_divides_once_by_all_weights(program, cap_mb, split):
    compare(program(), SHARES[split], way="weighted", cap_mb=cap_mb)
