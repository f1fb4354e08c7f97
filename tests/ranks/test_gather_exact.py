# SPDX-License-Identifier: Apache-2.0
"""Losses over the rows of all ranks have the gradients of one process, with factor 1.

The data differ between ranks, and the losses hold parameters of their own: on symmetric data,
or looking at the encoder alone, wrong gathers come out right.
"""

import pytest

import lockstep
from harness import assert_equal_on_all_ranks, assert_same, cut, gradients, rows, run_ranks
from lockstep.reduction_context import ReductionContext, activate
from lockstep.sync import GradientSync, replicate
from ranks.contrastive import LOSSES, SPLITS, SYNCS, on_ranks, one_process, towers


def compare(loss, sizes, sync, *, weighted):
    steps = 3
    truth, true_values = one_process(loss, sizes, steps)
    results = on_ranks(loss, sizes, steps, sync, weighted=weighted)
    for step in range(steps):
        assert_equal_on_all_ranks([seen[step] for seen, _ in results])
        assert_same(results[0][0][step], truth[step])
        if loss.any_weights:
            for _, values in results:
                assert values[step] == pytest.approx(true_values[step], rel=1e-12)


def splits(*quick):
    """The others belong to the long table."""
    return [
        pytest.param(sizes, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, sizes in SPLITS.items()
    ]


BY_SYNC = [
    pytest.param(name, marks=() if name == "replicate" else pytest.mark.slow) for name in SYNCS
]


@pytest.mark.parametrize("loss", ["info_nce", "weights"])
@pytest.mark.parametrize("sync", SYNCS)
def test_any_sync(loss, sync):
    compare(LOSSES[loss], SPLITS["2 uneven"], sync, weighted=True)


@pytest.mark.sampled
@pytest.mark.parametrize("sync", BY_SYNC)
@pytest.mark.parametrize("sizes", splits("2 uneven", "2, one empty", "4 uneven"))
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_weighed_by_rows(loss, sizes, sync):
    compare(loss, sizes, sync, weighted=True)


@pytest.mark.sampled
@pytest.mark.parametrize("sync", BY_SYNC)
@pytest.mark.parametrize("sizes", splits("2 even", "2, one empty"))
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_plain_backward(loss, sizes, sync):
    if loss.any_weights or len(set(sizes)) == 1:
        compare(loss, sizes, sync, weighted=False)
    else:
        # Not the objective: the loss of each rank counts alike, its rows do not. A gather warns.
        with pytest.raises((AssertionError, UserWarning)):
            compare(loss, sizes, sync, weighted=False)


@pytest.mark.parametrize("way", ["plain", "weighted"])
@pytest.mark.parametrize("backward", ["adjoint", "replicated"])
@pytest.mark.parametrize("sizes", [[11, 10], [14, 7], [12, 0, 9]], ids=str)
def test_losses_that_are_added_up(sizes, backward, way):
    """The samples of a batch do not weigh its sum, which counts once on each rank that has any."""
    features, true = rows(21, 5, seed=21), towers()
    counting = sum(size > 0 for size in sizes)

    def loss_of(model, encoded):
        return model.head(encoded).square().mean() * model.scale

    (counting * loss_of(true, true.left(features))).backward()
    replicas = [towers() for _ in sizes]

    def body(group):
        model, mine = replicas[group.rank], cut(21, sizes)[group.rank]
        weight = sizes[group.rank]
        sync = GradientSync([model], group, averages=False)
        sync.set_delivered_weight(weight)
        try:
            with activate(ReductionContext(group, weight, averages=False)):
                everyone = lockstep.gather(model.left(features[mine]), backward=backward)
                loss = loss_of(model, everyone)
                loss.backward() if way == "plain" else sync.backward(loss, weight=weight)
        finally:
            sync.detach()
        return gradients(model)

    for found in run_ranks(len(sizes), body):
        assert_same(found, gradients(true))


@pytest.mark.parametrize("sizes", [[12], [7, 5]], ids=["alone", "2 uneven"])
def test_gathered_rows_that_are_written_to(sizes):
    """They are a copy at any number of ranks, so that the rank's own rows stay as they were."""
    features, true = rows(12, 5, seed=22), towers()

    def loss_of(own, everyone):
        everyone.sub_(everyone.mean(dim=0))
        return (own @ everyone.T).square().mean()

    encoded = true.left(features)
    value = loss_of(encoded, encoded.clone())
    value.backward()
    replicas = [towers() for _ in sizes]

    def body(group):
        model, mine = replicas[group.rank], cut(12, sizes)[group.rank]
        sync = replicate(model, group=group)
        try:
            own = model.left(features[mine])
            loss = loss_of(own, lockstep.gather(own, group=group))
            sync.backward(loss, weight=sizes[group.rank])
        finally:
            sync.detach()
        return gradients(model), loss.item() * sizes[group.rank] / 12

    results = run_ranks(len(sizes), body)
    for found, _ in results:
        assert_same(found, gradients(true))
    assert sum(share for _, share in results) == pytest.approx(value.item(), rel=1e-12)
