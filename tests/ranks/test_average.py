# SPDX-License-Identifier: Apache-2.0
"""`average_gradients`: once, by hand, whatever each rank has."""

import pytest
import torch
from torch import nn

from harness import assert_equal_on_all_ranks, assert_same, gradients, reset, rows, run_ranks
from lockstep.errors import (
    ConfigurationError,
    ReplicasDifferError,
    SparseGradientError,
    UnknownParameterError,
    WeightError,
)
from lockstep.sync import average_gradients, local, replicate

X = rows(9, 4, seed=1)


def experts():
    return reset(nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)]), seed=5)


@pytest.mark.parametrize("counts", [(9,), (5, 4), (9, 0), (2, 3, 4), (0, 4, 4, 1)])
def test_the_weighted_mean_whatever_each_rank_used(counts):
    replicas = [experts() for _ in counts]
    starts = [sum(counts[:rank]) for rank in range(len(counts))]

    def loss(model, part, total):
        # Rows go to the first or second expert by their number; the third is never used.
        for number, row in enumerate(part, start=total):
            yield model[number % 2 if number < 4 else 1](row).square().sum()

    def body(group):
        model = replicas[group.rank]
        start, count = starts[group.rank], counts[group.rank]
        if count:
            (sum(loss(model, X[start : start + count], start)) / count).backward()
        average_gradients(model, weight=count, group=group)
        return gradients(model)

    true = experts()
    (sum(loss(true, X, 0)) / len(X)).backward()
    results = run_ranks(len(counts), body)
    assert_same(results[0], gradients(true))
    assert_equal_on_all_ranks(results)


def test_different_gradients_of_equal_shape_are_not_averaged_with_each_other():
    replicas = [experts() for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        model[group.rank](X).square().mean().backward()
        average_gradients(model, group=group)
        return gradients(model)

    true = experts()
    ((true[0](X).square().mean() + true[1](X).square().mean()) / 2).backward()
    for got in run_ranks(2, body):
        assert_same(got, gradients(true))


@pytest.mark.parametrize("having", [(0, 1), (1,)], ids=["all", "one"])
def test_what_was_frozen_after_its_backward_is_averaged(having):
    replicas = [experts() for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        if group.rank in having:
            model[0](X[group.rank :]).square().mean().backward()
        model.requires_grad_(False)
        average_gradients(model, group=group)
        return gradients(model)

    true = experts()
    (sum(true[0](X[start:]).square().mean() for start in having) / 2).backward()
    for got in run_ranks(2, body):
        assert_same(got, gradients(true))


def test_refusals():
    tables = [reset(nn.Embedding(3, 2, sparse=sparse), seed=6) for sparse in (False, True)]
    replicas = [[experts(), table] for table in tables]

    def body(group):
        model, table = replicas[group.rank]
        with pytest.raises(WeightError, match="add up to zero"):
            average_gradients(model, weight=0, group=group)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(SparseGradientError, match=r"rank 1 of 2(.|\n)*`weight`"):
            average_gradients(table, group=group)
        with pytest.raises(ReplicasDifferError, match="rank 1 against rank 0"):
            average_gradients(nn.Linear(2, 2 + group.rank), group=group)
        sync = replicate(model, group=group)
        with pytest.raises(ConfigurationError, match="synchronised already"):
            average_gradients(model, group=group)
        sync.detach()

    run_ranks(2, body)
    with pytest.raises(WeightError, match="LS202"):
        average_gradients(experts(), weight=-1)


def test_a_rank_alone():
    model = experts()
    model[0](X).mean().backward()
    before = gradients(model)
    average_gradients(model)
    assert_same(gradients(model), before, tolerance=0.0)


def test_what_weighs_nothing_contributes_nothing_even_where_it_is_nan():
    replicas = [experts() for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        if group.rank == 0:
            model[0](X).square().mean().backward()
        else:
            (torch.nan * (model[0](X) + model[1](X)).square().mean()).backward()
        average_gradients(model, weight=1 - group.rank, group=group)
        return gradients(model)

    true = experts()
    # The weightless rank alone has used the second one: it gets zeros, and the third stays None.
    (true[0](X).square().mean() + 0.0 * true[1](X).square().mean()).backward()
    results = run_ranks(2, body)
    assert_same(results[0], gradients(true))
    assert_equal_on_all_ranks(results)


@pytest.mark.parametrize("counts", [(60_001, 60_001), (60_001, 1)])
def test_many_tokens_do_not_overflow_a_low_precision(counts):
    def body(group):
        model = reset(nn.Linear(2, 1, bias=False), seed=3).half()
        model.weight.grad = torch.full_like(model.weight, 3.0)
        average_gradients(model, weight=counts[group.rank], group=group)
        return model.weight.grad.tolist()

    assert run_ranks(2, body) == [[[3.0, 3.0]]] * 2


def test_averaged_gradients_beside_a_synchronised_model_are_stepped_with():
    """The guard knows that ranks have the same ones; a gradient assigned later is unknown."""

    def body(group):
        body, head = reset(nn.Linear(4, 3), seed=3), reset(nn.Linear(3, 2), seed=4)
        sync = replicate(body, group=group)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
        head(body(X[group.rank :: 2])).square().mean().backward()
        average_gradients(head, group=group)
        optimizer.step()
        weights = [param.detach().clone() for param in (*body.parameters(), *head.parameters())]
        head.weight.grad = torch.ones_like(head.weight)
        with pytest.raises(UnknownParameterError, match="nobody synchronises"):
            optimizer.step()
        sync.detach()
        return {str(number): weight for number, weight in enumerate(weights)}

    assert_equal_on_all_ranks(run_ranks(2, body))


def test_nothing_but_local_parameters_is_refused():
    def body(group):
        with pytest.raises(ConfigurationError, match="each rank's own"):
            average_gradients(local(nn.Linear(4, 3)), group=group)

    run_ranks(2, body)


def step(model, optimizer, group):
    optimizer.zero_grad()
    model[0](X[group.rank :: 2]).square().mean().backward()
    average_gradients(model, weight=len(X[group.rank :: 2]), group=group)
    optimizer.step()


def test_models_that_were_built_without_a_seed_are_refused_before_gradients_move():
    replicas = [experts(), experts()]
    reset(replicas[1][2], seed=6)  # the part that has no gradient, too

    def body(group):
        model = replicas[group.rank]
        for _ in range(2):  # also when the program goes on
            with pytest.raises(ReplicasDifferError, match=r"rank 1 (.|\n)*`2.weight`"):
                step(model, torch.optim.SGD(model.parameters(), lr=0.1), group)
        return all(map(torch.equal, model.parameters(), experts().parameters()))

    assert run_ranks(2, body) == [True, False]


def test_a_model_that_is_compared_on_one_rank_only_is_compared_by_all():
    """One rank has loaded its model anew; what a rank may have of its own is not compared."""
    replicas = [experts() for _ in range(2)]
    for rank, model in enumerate(replicas):
        model.own = local(reset(nn.Linear(4, 3), seed=rank))

    def body(group):
        model = replicas[group.rank]
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), group)
        if group.rank == 1:
            model[0].load_state_dict(reset(nn.Linear(4, 3), seed=9).state_dict(), assign=True)
        with pytest.raises(ReplicasDifferError, match=r"`0.weight`, `0.bias`\n"):
            step(model, torch.optim.SGD(model.parameters(), lr=0.1), group)

    run_ranks(2, body)
