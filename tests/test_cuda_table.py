# SPDX-License-Identifier: Apache-2.0
"""The tables of `ranks/test_oracle_table.py` and of `procs`, on a CUDA device that all ranks share.

Over gloo, because NCCL wants a device for each rank: the streams, the copies and the kernels are
those of a GPU. The truth is computed on the CPU.
"""

import pytest
import torch
from tests.procs.pool import Pool

from lockstep.errors import (
    DataOrderError,
    GradientNotReducedError,
    PerShardLossError,
    UnitOrderError,
)
from ranks.divergent import DIVERGENT
from ranks.table import SPLITS, check, pairwise
from ranks.table_operators import OPERATORS

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

# SyncBatchNorm works on a GPU, and its kernels keep statistics in lower precision than float64.
NAMES = tuple(name for name in OPERATORS if name not in ("Normalised", "Compiled"))
REFUSED = {"ByHand": GradientNotReducedError}
SYNCS = ("replicate", "ddp", "parameter_server", "fsdp")
CELLS = pairwise(SYNCS, NAMES, tuple(SPLITS), (2, 3)) | pairwise(
    ("units",), tuple(name for name in NAMES if name not in REFUSED), tuple(SPLITS), (2, 3)
)


COPIES = [
    (name, tuple(SPLITS)[number % len(SPLITS)])
    for number, name in enumerate(name for name in NAMES if name not in REFUSED)
]


@pytest.fixture(scope="module")
def pool():
    processes = Pool(4)
    yield processes
    processes.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("sync", "name", "split", "num_workers"), sorted(CELLS))
def test_exact_or_refused(pool, sync, name, split, num_workers):
    check(pool.run(sync, name, split, num_workers, use_gpu=True), name, split, REFUSED.get(name))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "split"), COPIES)
def test_two_copies_of_two_ranks_each(pool, name, split):
    check(pool.run("copies", name, split, 4, use_gpu=True), name, split)


@pytest.mark.parametrize("sync", ["replicate", "parameter_server"])
def test_a_loss_of_each_shard_by_itself_is_refused(pool, sync):
    results = pool.run(sync, "Normalised", "uneven", 2, use_gpu=True)
    check(results, "Normalised", "uneven", PerShardLossError)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", DIVERGENT)
def test_ranks_that_go_through_other_layers_are_refused_on_all(pool, name):
    results = pool.run("units", name, "uneven", 2, use_gpu=True)
    check(results, name, "uneven", (UnitOrderError, DataOrderError))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    ["TakesTurns", "ChangesItsWay", "AsksEverybody", "FailsInTheMiddle", "KeepsACast"],
)
def test_what_programs_do_between_the_collectives_is_not_lost(pool, name):
    check(pool.run("units", name, "uneven", 2, use_gpu=True), name, "uneven")
