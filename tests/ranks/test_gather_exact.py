# SPDX-License-Identifier: Apache-2.0
"""Losses over the rows of all ranks have the gradients of one process, with factor 1.

The data differ between ranks, and the losses hold parameters of their own: on symmetric data,
or looking at the encoder alone, wrong gathers come out right.
"""

import pytest

from harness import assert_equal_on_all_ranks, assert_same
from ranks.contrastive import LOSSES, SPLITS, SYNCS, on_ranks, one_process


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


@pytest.mark.parametrize("sync", BY_SYNC)
@pytest.mark.parametrize("sizes", splits("2 uneven", "2, one empty", "4 uneven"))
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_weighed_by_rows(loss, sizes, sync):
    compare(loss, sizes, sync, weighted=True)


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
