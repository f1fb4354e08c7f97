# SPDX-License-Identifier: Apache-2.0
"""N ranks have the gradients and the weights of one process on the same global batch."""

import copy

import pytest
import torch

from harness import assert_equal_on_all_ranks, assert_same, gradients, run_ranks
from lockstep.sync import replicate
from ranks.programs import PROGRAMS, Accumulated, AccumulatedOntoZeros, Plain, X, Y, prepared
from ranks.worlds import OneProcess, OnRanks

SHARES = {
    "alone": (1.0,),
    "even": (0.5, 0.5),
    "uneven": (0.75, 0.25),
    "empty": (1.0, 0.0),
    "empty_first": (0.0, 0.6, 0.4),
    "four": (0.4, 0.1, 0.2, 0.3),
}


def weights(modules):
    return {
        f"{place}.{name}": param.detach().clone()
        for place, module in enumerate(modules)
        for name, param in module.named_parameters()
    }


def compare(program, shares, *, way, cap_mb, hosts=""):
    oracle = OneProcess(prepared(program))
    program.run(oracle)
    # Built before the ranks start: threads share the global random numbers.
    replicas = [prepared(program) for _ in shares]

    def one_rank(group):
        group.use_hosts(hosts, least_bytes=0)
        modules = replicas[group.rank]
        world = OnRanks(modules, group, shares, way=way, cap_mb=cap_mb)
        copy.deepcopy(program).run(world)
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
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("way", ["weighted", "plain", "borrowed"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_one_process(program, way, shares):
    # Small buckets for all but the even split: then several are in flight during backward.
    compare(program(), shares, way=way, cap_mb=25 if shares == (0.5, 0.5) else 1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("program", [Accumulated, AccumulatedOntoZeros])
def test_accumulation_divides_once_by_all_weights(program, shares, cap_mb):
    compare(program(), shares, way="weighted", cap_mb=cap_mb)


def test_the_measure_is_strict():
    true = {"a": torch.ones(3, dtype=torch.float64), "b": None}
    assert_same(true, true)
    for wrong in (true["a"] * (1 + 1e-11), true["a"] * 2, None):
        with pytest.raises(AssertionError):
            assert_same({"a": wrong, "b": None}, true)
    with pytest.raises(AssertionError):
        assert_same({"a": true["a"], "b": torch.zeros(1)}, true)


@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_whichever_parameter_is_the_only_one_that_a_backward_reaches(cap_mb):
    replicas = [prepared(Plain()) for _ in range(2)]

    def one_rank(group):
        (model,) = replicas[group.rank]
        sync = replicate(model, group=group, bucket_cap_mb=cap_mb)
        seen = []
        for param in model.parameters():
            model.zero_grad()
            (param.square().sum() * (1 + 2 * group.rank)).backward()
            seen.append(gradients(model))
        sync.detach()
        return seen

    (true,) = prepared(Plain())
    results = run_ranks(2, one_rank)
    for number, param in enumerate(true.parameters()):
        true.zero_grad()
        (param.square().sum() * 2).backward()
        for seen in results:
            assert_same(seen[number], gradients(true))


@pytest.mark.slow
def test_a_compiled_model():
    compiled = [torch.compile(prepared(Plain())[0], backend="aot_eager") for _ in range(2)]
    for model in compiled:  # threads must not compile at the same time
        model(X).sum().backward()
        model.zero_grad()

    def one_rank(group):
        model = compiled[group.rank]
        sync = replicate(model, group=group)
        mine = slice(0, 5) if group.rank == 0 else slice(5, 12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            part = X[mine]
            sync.backward(((model(part) - Y[mine]) ** 2).sum(1).mean(), weight=len(part))
            optimizer.step()
        sync.detach()
        return gradients(model)

    (true,) = prepared(Plain())
    optimizer = torch.optim.SGD(true.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        ((true(X) - Y) ** 2).sum(1).mean().backward()
        optimizer.step()
    for got in run_ranks(2, one_rank):
        assert_same(dict(zip(gradients(true), got.values(), strict=True)), gradients(true))
