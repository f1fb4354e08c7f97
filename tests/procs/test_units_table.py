# SPDX-License-Identifier: Apache-2.0
"""The table of `ranks/test_oracle_table.py` for models of which no rank ever holds all layers."""

import pytest
import torch
from tests.torch_versions import needs_unit_hooks

from lockstep.errors import (
    DataOrderError,
    GradientNotReducedError,
    NonFiniteError,
    NotAvailableError,
    PeerLostError,
    UnitOrderError,
)
from ranks.divergent import DIVERGENT
from ranks.table import SPLITS, check, one_process, put_together
from ranks.table_operators import OPERATORS

pytestmark = needs_unit_hooks

# SyncBatchNorm without a GPU by torch.
REFUSED = {
    "ByHand": "gradients of sharded weights",
    "Normalised": "SyncBatchNorm expected input tensor to be on GPU",
    "Compiled": "compile its units",
    "CallsALayerByItself": "call the model",
    "LoadsAfterRegister": "load weights before register",
}
NAMES = tuple(name for name in OPERATORS if name not in REFUSED)


def every_fourth(names):
    """The others are slow: of each cell two to four processes go through a program."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=slow if k % 4 else ()) for k, n in enumerate(names)]


@pytest.mark.sampled
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_exact(pool, name, split, num_workers):
    check(pool.run("units", name, split, num_workers), name, split)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("split", SPLITS)
# DTensor puts what this program computes from two gradients into columns, and says so.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "TwoTasks"])
def test_four_workers(pool, name, split):
    check(pool.run("units", name, split, 4), name, split)


@pytest.mark.sampled
@pytest.mark.timeout(120)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", every_fourth(NAMES))
def test_two_copies_of_two_ranks_each(pool, name, split):
    check(pool.run("copies", name, split, 4), name, split)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", every_fourth(DIVERGENT))
def test_ranks_of_copies_that_go_through_other_layers_are_refused_on_all(pool, name):
    results = pool.run("copies", name, "uneven", 4)
    check(results, name, "uneven", (UnitOrderError, DataOrderError))


@pytest.mark.sampled
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", every_fourth(DIVERGENT))
def test_ranks_that_go_through_other_layers_are_refused_on_all(pool, name, num_workers):
    results = pool.run("units", name, "uneven", num_workers)
    # A rank that has run out of steps hears of it at its next pass over the data.
    check(results, name, "uneven", (UnitOrderError, DataOrderError))
    ranks = [seen for seen, _ in results]
    (since,) = [seen.apart_since for seen in ranks if seen.apart_since is not None]
    # Well under a second on an idle machine, and far from the group's timeout on a busy one.
    assert max(seen.refused_at for seen in ranks) - since < 20.0


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        "TakesTurns",
        "ChangesItsWay",
        "AsksEverybody",
        "OnMeta",
        "WritesAfterALook",
        "ClearedBeforeBackward",
        "FailsInTheMiddle",
        "HookedBefore",
        "KeepsACast",
    ],
)
def test_what_programs_do_between_the_collectives_is_not_lost(pool, name):
    check(pool.run("units", name, "uneven", 2), name, "uneven")


@pytest.mark.timeout(120)
def test_layers_may_compute_in_fewer_bits_than_gradients_are_summed_in(pool):
    results = put_together(pool.run("units", "InHalfTheBits", "uneven", 2))
    true = one_process("InHalfTheBits", "uneven")
    for seen, refusal in results:
        assert refusal is None
        assert seen.also["in float32"] == 1.0
        for name, expected in true.weights[-1].items():
            assert seen.weights[-1][name].dtype is torch.float64
            apart = (seen.weights[-1][name] - expected).abs().max()
            assert 1e-12 < apart < 1e-6, name


@pytest.mark.timeout(120)
def test_ranks_that_compute_in_different_dtypes_are_refused_at_once(pool):
    for refusal in pool.run("units", "InHalfTheBitsOnOneRank", "uneven", 2):
        assert "the ranks did not build the same model" in str(refusal)
        assert "got      mp_policy=MixedPrecisionPolicy(param_dtype=None" in str(refusal)


@pytest.mark.timeout(120)
def test_nothing_of_a_borrowed_batch_comes_to_a_gradient(pool):
    name = "InfiniteWhereBorrowed"
    check(pool.run("units", name, "empty_last", 3), name, "empty_last")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Penalised", GradientNotReducedError),
        ("OfKeptTensors", GradientNotReducedError),
        ("GradientPenalty", NotAvailableError),
    ],
)
def test_a_gradient_that_no_unit_would_reduce_is_refused(pool, name, error):
    check(pool.run("units", name, "uneven", 2), name, "uneven", error)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize(
    "name",
    [
        "ReadsNumbersInItsStep",
        "KeepsNormsInItsState",
        "ClipsByHand",
        "MeasuresWeights",
        "MeasuresWeightsInItsBatch",
    ],
)
def test_a_number_that_is_read_of_a_shard_is_that_of_the_whole(pool, name, num_workers):
    check(pool.run("units", name, "empty_last", num_workers), name, "empty_last")


@pytest.mark.timeout(120)
def test_a_number_that_is_read_in_one_of_two_copies_is_that_of_the_whole(pool):
    check(pool.run("copies", "ClipsByHand", "empty_last", 4), "ClipsByHand", "empty_last")


@pytest.mark.timeout(120)
def test_a_number_that_is_read_of_a_gradient_is_that_of_the_whole(pool):
    check(pool.run("fsdp", "ReadsNumbersInItsStep", "uneven", 3), "ReadsNumbersInItsStep", "uneven")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [2, 3])
def test_what_is_not_finite_in_one_ranks_rows_is_refused_on_all(pool, num_workers):
    results = pool.run("units", "NotFiniteInTheLastRow", "even", num_workers)
    check(results, "NotFiniteInTheLastRow", "even", NonFiniteError)


@pytest.mark.timeout(120)
def test_a_batch_without_weight_leaves_no_nan_in_its_window(pool):
    for seen, refusal in pool.run("units", "NotFiniteWithoutWeight", "even", 2):
        assert refusal is None
        assert all(rows.tensor.isfinite().all() for rows in seen.weights[-1].values())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("AssignsData", "was assigned to `.data`"),
        ("WritesInForward", "a forward has written to a weight"),
        ("WritesToDataInForward", "a forward has written to a weight"),
        ("AssignsDataInForward", "a forward has written to a weight"),
        ("DrawsForWeights", "would not be those of the whole weight"),
    ],
)
def test_a_write_that_shards_take_no_notice_of_is_refused(pool, name, text):
    results = pool.run("units", name, "even", 2)
    refusals = [each if isinstance(each, BaseException) else each[1] for each in results]
    assert any(text in str(refusal) for refusal in refusals), refusals
    assert all(isinstance(each, (NotAvailableError, PeerLostError)) for each in refusals), refusals


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("split", SPLITS)
def test_units_may_be_compiled(pool, split):
    check(pool.run("units", "InCompiledUnits", split, 2), "InCompiledUnits", split)


@pytest.mark.timeout(120)
def test_each_rank_looks_for_the_rows_whose_loss_is_not_finite(pool):
    results = pool.run("units", "GetsInfinity", "uneven", 3)
    check(results, "GetsInfinity", "uneven", NonFiniteError)
    for _, refusal in results:
        assert "3 samples on rank 2" in str(refusal), refusal
        assert "the loss is inf" in str(refusal), refusal


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_an_error_on_every_rank(pool, name):
    results = pool.run("units", name, "even", 2)
    assert all(REFUSED[name] in str(result) for result in results), results
