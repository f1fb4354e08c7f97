# SPDX-License-Identifier: Apache-2.0
"""A backward within `compute_loss`: reduced with the weight of its shard, or refused."""

import pytest

from lockstep.errors import WeightError
from ranks.table import check, on_threads

SYNCS = ("replicate", "ddp", "parameter_server")


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("num_workers", [2, 3])
def test_it_counts_as_the_loss_of_its_shard(sync, num_workers):
    """Of 11 rows each worker has another number."""
    results = on_threads(sync, "BackwardInTheLoss", "uneven", num_workers)
    check(results, "BackwardInTheLoss", "uneven")


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(
    ("name", "split", "num_workers", "cause"),
    [
        ("BackwardInTheLoss", "empty_last", 2, "has no samples"),
        ("BackwardInTheLoss", "even", 1, "several shards"),
        ("BackwardInTheLossOfAWindow", "even", 2, "accumulate"),
    ],
)
def test_it_is_refused_where_its_peers_run_none(sync, name, split, num_workers, cause):
    results = on_threads(sync, name, split, num_workers)
    check(results, name, split, WeightError)
    assert any(cause in str(result[1]) for result in results)
