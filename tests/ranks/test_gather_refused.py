# SPDX-License-Identifier: Apache-2.0
"""What cannot be right is refused on every rank, with its name: nobody hangs, nothing aborts."""

import re
import threading

import pytest
import torch
from torch import nn

import lockstep
from harness import assert_same, gradients, outcomes, reset, rows, run_ranks
from lockstep.errors import (
    ConfigurationError,
    CrossedWeightsError,
    LossesDifferError,
    PeerLostError,
    PerShardLossError,
    ReplicasDifferError,
    RowsDifferError,
    WrongTypeError,
    WrongUseError,
)
from lockstep.parity import compare
from lockstep.reduction_context import ReductionContext, activate
from lockstep.sync import replicate
from ranks.contrastive import LEFT, RIGHT, clip, towers


def refused_everywhere(size, body, error, match):
    """Every rank raises `error`; returns the first message."""
    results = outcomes(size, body)
    assert [type(result) for result in results] == [error] * size, results
    for result in results:
        assert re.search(match, str(result)), result
    return str(results[0])


def leaf(*shape, dtype=torch.float64):
    return torch.ones(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


@pytest.mark.parametrize("size", [2, 4])
def test_uneven_rows_where_they_are_not_wanted(size):
    def body(group):
        lockstep.gather(leaf(4 - group.rank, 3), group=group, uneven="error")

    message = refused_everywhere(size, body, RowsDifferError, "different numbers of rows")
    assert "rank 0: (4, 3) float64" in message
    assert f"rank {size - 1}: ({5 - size}, 3)" in message
    assert 'uneven="pad"' in message


@pytest.mark.parametrize(
    ("bring", "what"),
    [
        (lambda rank: leaf(4, 3, dtype=[torch.float64, torch.float32][rank == 1]), "dtypes"),
        (lambda rank: leaf(4, 3 + (rank == 1)), "shapes"),
        (lambda rank: leaf(*[4, 3, 2][: 2 + (rank == 1)]), "numbers of dimensions"),
        (lambda rank: leaf(4, 3).detach() if rank == 1 else leaf(4, 3), "requires_grad"),
    ],
    ids=["dtype", "trailing", "dimensions", "requires_grad"],
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("function", ["gather", "info_nce"])
def test_tensors_that_do_not_fit_together(function, size, bring, what):
    def body(group):
        if function == "gather":
            lockstep.gather(bring(group.rank), group=group)
        else:
            lockstep.info_nce(bring(group.rank), bring(group.rank), 1.0, group=group)

    message = refused_everywhere(size, body, RowsDifferError, f"different {what}")
    assert "rank 1 against rank 0" in message


def test_ranks_that_have_come_to_different_functions():
    def body(group):
        if group.rank == 0:
            lockstep.gather(leaf(4, 3), group=group)
        else:
            lockstep.nt_xent(leaf(4, 3), leaf(4, 3), 1.0, group=group)

    refused_everywhere(2, body, ConfigurationError, "rank 1 against rank 0")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_numbers_that_have_no_gradient(dtype):
    def body(group):
        dtypes = [torch.float64, dtype]
        lockstep.gather(torch.ones(4, dtype=dtypes[group.rank]), group=group)

    message = refused_everywhere(2, body, WrongTypeError, "rank 1")
    assert ".double()).long()" in message


@pytest.mark.parametrize("function", ["global_mean", "info_nce", "nt_xent"])
def test_a_loss_of_integers_is_not_told_what_helps_labels(function):
    def body(group):
        x = torch.ones(4, 2, dtype=torch.int64)
        if function == "global_mean":
            lockstep.global_mean(x, group=group)
        else:
            getattr(lockstep, function)(x, x, 1.0, group=group)

    message = refused_everywhere(2, body, WrongTypeError, f"{function}.* cannot have one")
    assert "labels" not in message
    assert "x.to(torch.float32)" in message


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float16])
def test_labels_have_a_place_as_rows_have(dtype):
    def body(group):
        return lockstep.rank_slice(torch.ones(2 + group.rank, dtype=dtype), group=group)

    assert run_ranks(3, body) == [slice(0, 2), slice(2, 5), slice(5, 9)]


def test_the_place_of_what_has_no_rows_or_others():
    def of(tensors):
        return lambda group: lockstep.rank_slice(tensors[group.rank], group=group)

    scalar = torch.tensor(1)
    refused_everywhere(2, of([scalar, scalar]), WrongTypeError, r"rank_slice(.|\n)*unsqueeze")
    labels, others = torch.ones(4, dtype=torch.int64), torch.ones(4, 2, dtype=torch.int64)
    message = refused_everywhere(2, of([labels, others]), RowsDifferError, "numbers of dimensions")
    assert "rank 1: (4, 2) int64" in message


def test_a_scalar_is_no_losses_to_average_over():
    """As one row its mean would be the mean of the ranks' means."""

    def body(group):
        lockstep.global_mean(torch.ones(()), group=group)

    message = refused_everywhere(2, body, WrongTypeError, 'reduction="none"')
    assert "unsqueeze" not in message


def test_a_scalar_has_no_rows():
    refused_everywhere(
        2, lambda group: lockstep.gather(torch.ones(()), group=group), WrongTypeError, "unsqueeze"
    )


@pytest.mark.parametrize("size", [2, 4])
def test_one_loss_is_needed_for_replicated(size):
    """Its own rows' loss on each rank: the slice of a rank's own gradient is not enough."""

    def body(group):
        x = rows(4, 3, seed=group.rank).requires_grad_()
        everyone = lockstep.gather(x, group=group, backward="replicated")
        everyone[lockstep.rank_slice(x, group=group)].square().sum().backward()

    message = refused_everywhere(size, body, LossesDifferError, "needs one loss")
    assert 'backward="adjoint"' in message


def test_negatives_of_its_own_on_each_rank_are_not_one_loss():
    def body(group):
        x = rows(4, 3, seed=group.rank).requires_grad_()
        everyone = lockstep.gather(x, group=group, backward="replicated")
        similar = everyone @ everyone.T
        keep = rows(8, 8, seed=9 + group.rank) > 0
        (similar * keep).exp().mean().log().backward()

    refused_everywhere(2, body, LossesDifferError, "rank 1 against")


def test_a_loss_times_the_number_of_ranks_is_named_by_the_parity_report():
    """Autograd cannot see it; a comparison with one process can, by parameter."""
    true = towers()
    clip(*true(LEFT, RIGHT), true.scale).backward()
    replicas = [towers() for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        mine = slice(12 * group.rank, 12 * group.rank + 12)
        a, b = (lockstep.gather(x, group=group) for x in model(LEFT[mine], RIGHT[mine]))
        sync.backward(clip(a, b, model.scale) * group.size)
        sync.detach()
        return gradients(model)

    report = compare(gradients(true), run_ranks(2, body))
    scale = next(row for row in report.rows if "log_scale" in row.parameter)
    assert scale.scale == pytest.approx(2)
    assert "2 times too large" in scale.explanation
    assert "loss x N" in scale.explanation


def mean_over_own_rows(group, sizes, backward):
    x = rows(sizes[group.rank], 3, seed=group.rank).requires_grad_()
    everyone = lockstep.gather(x, group=group)
    mine = lockstep.rank_slice(x, group=group)
    similar = everyone[mine] @ everyone.T
    backward(torch.logsumexp(similar, 1))


def test_means_over_unequal_numbers_of_rows_are_warned_of():
    def body(group):
        mean_over_own_rows(group, [4, 2], lambda losses: losses.mean().backward())

    with pytest.warns(UserWarning, match=r"\[LS212\].*\[4, 2\].*weight=len"):
        run_ranks(2, body)


def test_a_rank_without_rows_is_named_there():
    def body(group):
        mean_over_own_rows(group, [4, 0], lambda losses: losses.sum().backward())

    with pytest.warns(UserWarning, match="rank 1 has none"):
        run_ranks(2, body)


@pytest.mark.parametrize("sizes", [[4, 4], [4, 2]])
def test_right_means_are_not_warned_of(sizes):
    def body(group):
        def global_mean(losses):
            lockstep.global_mean(losses, group=group).backward()

        mean_over_own_rows(group, sizes, global_mean)

    run_ranks(2, body)


@pytest.mark.parametrize("function", ["global_mean", "info_nce", "nt_xent"])
def test_a_loss_over_no_rows(function):
    def body(group):
        FUNCTIONS[function](leaf(0, 3), group)

    message = refused_everywhere(2, body, RowsDifferError, "zero rows on ranks 0, 1")
    assert "reduce_pending()" in message


def test_a_rank_without_rows_where_all_should_have_as_many():
    def body(group):
        lockstep.gather(leaf(4 * (group.rank != 1), 3), group=group, uneven="error")

    refused_everywhere(3, body, RowsDifferError, r"rank 1: \(0, 3\) float64.*zero rows")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: lockstep.gather(x),
        lambda x: lockstep.rank_slice(x),
        lambda x: lockstep.global_mean(x),
        lambda x: lockstep.info_nce(x, x, 1.0),
        lambda x: lockstep.nt_xent(x, x, 1.0),
    ],
)
def test_without_a_process_group(call):
    with pytest.raises(WrongUseError, match="init_process_group"):
        call(torch.ones(2, 2))


FUNCTIONS = {
    "gather": lambda x, group: lockstep.gather(x, group=group).square().sum(),
    "replicated": lambda x, group: (
        lockstep.gather(x, group=group, backward="replicated").square().sum()
    ),
    "global_mean": lambda x, group: lockstep.global_mean(x.square(), group=group),
    "info_nce": lambda x, group: lockstep.info_nce(x, x * 2, 1.0, group=group),
    "nt_xent": lambda x, group: lockstep.nt_xent(x, x * 2, 1.0, group=group),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_second_differentiation(function):
    def body(group):
        x = rows(4, 3, seed=group.rank).requires_grad_()
        (slope,) = torch.autograd.grad(function(x, group), x, create_graph=True)
        slope.square().sum().backward()

    refused_everywhere(2, body, WrongUseError, "differentiated once")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(each, id=name, marks=() if name == "gather" else pytest.mark.slow)
        for name, each in FUNCTIONS.items()
    ],
)
def test_a_rank_that_leaves_its_backward_out_is_named(function, size):
    """By the time-out of the group, which the others' backward is bounded by."""

    def body(group):
        x = rows(4, 3, seed=group.rank).requires_grad_()
        loss = function(x, group)
        if group.rank == 1:
            here.wait(20)
            return
        try:
            loss.backward()
        finally:
            gone.append(group.rank)
            if len(gone) == size - 1:
                here.set()

    here, gone = threading.Event(), []
    results = outcomes(size, body, timeout_s=3.0)
    for rank, result in enumerate(results):
        if rank != 1:
            assert isinstance(result, PeerLostError), result
    # Whoever gives up first closes the connections of all.
    assert any("rank 1 did not come" in str(result) for result in results)
    assert any("agree to leave it out" in str(result) for result in results)


def test_backwards_in_another_order_are_refused():
    def body(group):
        x, y = (rows(4, 3, seed=seed).requires_grad_() for seed in (1, 2))
        one, two = lockstep.gather(x, group=group), lockstep.gather(y, group=group)
        order = [one, two] if group.rank == 0 else [two, one]
        for gathered in order:
            gathered.sum().backward()

    refused_everywhere(2, body, RowsDifferError, "different calls")


def test_plain_backwards_of_unequal_weights():
    """Their weights are applied at the reduction, too late for what has crossed ranks."""
    replicas = [reset(nn.Linear(3, 2), seed=1) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        x = rows(4 - 2 * group.rank, 3, seed=group.rank)
        try:
            sync.set_delivered_weight(len(x))
            lockstep.gather(model(x), group=group).square().mean().backward()
        finally:
            sync.detach()

    message = refused_everywhere(2, body, CrossedWeightsError, "unequal weights")
    assert "4 at the reduction on rank 0, 2 at the reduction on rank 1" in message
    assert "gradients.backward(loss, weight=...)" in message
    assert "self." not in message  # there is no trainer


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_rows_that_others_have_used_cannot_be_left_out_afterwards(function):
    """A weight of zero drops this rank's gradients; what the others' losses say would be lost."""
    replicas = [reset(nn.Linear(3, 3), seed=1) for _ in range(2)]

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        try:
            loss = function(model(rows(4, 3, seed=group.rank)), group)
            sync.backward(loss, weight=4 if group.rank == 0 else 0)
        finally:
            sync.detach()

    message = refused_everywhere(2, body, CrossedWeightsError, "would be dropped")
    assert "rank 1 of 2" in message
    assert "x[:0]" in message


def test_plain_backwards_of_equal_weights_and_of_none_are_right():
    true = reset(nn.Linear(3, 2), seed=1)
    everything = torch.cat([rows(4, 3, seed=rank) for rank in range(2)])
    true(everything).square().mean().backward()
    replicas = [reset(nn.Linear(3, 2), seed=1) for _ in range(3)]

    def body(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        weight = 4 if group.rank < 2 else 0
        x = rows(4, 3, seed=group.rank)
        sync.set_delivered_weight(weight)
        x = x if weight else x[:0]
        loss = lockstep.gather(model(x), group=group).square().mean()
        (loss if weight else loss * torch.nan).backward()
        sync.detach()
        return gradients(model)

    for found in run_ranks(3, body):
        assert_same(found, gradients(true))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_shard_alone(function):
    def body(group):
        with activate(ReductionContext(group, per_shard=True)):
            function(leaf(4, 3), None)

    message = refused_everywhere(2, body, PerShardLossError, "one shard")
    assert "joint_loss = True" in message


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_shard_of_a_prediction(function):
    def body(group):
        with activate(ReductionContext(group, per_shard=True, purpose="predict")):
            function(leaf(4, 3), None)

    message = refused_everywhere(2, body, PerShardLossError, "predict computes shard by shard")
    assert "joint_loss" not in message


def test_a_global_loss_is_not_added_up():
    def body(group):
        with activate(ReductionContext(group, averages=False)):
            lockstep.info_nce(leaf(4, 3), leaf(4, 3), 1.0)

    refused_everywhere(2, body, ConfigurationError, 'loss_reduction="sum"')


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda call: call.update(b=leaf(4, 2)), ConfigurationError, r"shapes \(n, D\)"),
        (lambda call: call.update(b=leaf(3, 3)), ConfigurationError, "as many rows of a"),
        (lambda call: call.update(positives=torch.full((4,), 8)), ConfigurationError, "0 to 7"),
        (lambda call: call.update(positives=torch.ones(4)), ConfigurationError, "one integer"),
        (lambda call: call.update(scale=3.0), ReplicasDifferError, "3 on rank 1"),
    ],
    ids=["not alike", "unequal", "outside", "not integers", "scale"],
)
def test_what_info_nce_cannot_use_on_one_rank(change, error, match):
    def body(group):
        call = {"a": leaf(4, 3), "b": leaf(4, 3), "scale": 1.0, "positives": torch.arange(4)}
        if group.rank == 1:
            change(call)
        if "as many" in match:
            call["positives"] = None
        a, b, scale, positives = call.values()
        lockstep.info_nce(a, b, scale, positives=positives, group=group)

    if "shapes" in match:
        # The columns' lengths differ between ranks as well, which is seen first.
        error, match = RowsDifferError, "different shapes"
    refused_everywhere(2, body, error, match)


@pytest.mark.parametrize(
    "arguments", [{"uneven": "cut"}, {"backward": "sum"}], ids=["uneven", "backward"]
)
def test_unknown_words(arguments):
    def body(group):
        lockstep.gather(leaf(4, 3), group=group, **arguments)

    refused_everywhere(2, body, ConfigurationError, '" or "')


def test_a_mean_over_rows_that_hold_no_number_is_refused_on_every_rank():
    def body(group):
        with pytest.raises(ConfigurationError, match="rows that hold no number"):
            lockstep.global_mean(torch.zeros(3, 0, requires_grad=True), group=group)
        return True

    assert run_ranks(2, body) == [True, True]
