# SPDX-License-Identifier: Apache-2.0
"""The table of `ranks/test_oracle_table.py` for what is in shards, and so needs a default group."""

import pytest

from lockstep.errors import GradientNotReducedError, PerShardLossError
from ranks.table import SPLITS, check
from ranks.table_operators import OPERATORS

# The compiler takes seconds in each process; three workers show whatever two and four do.
NAMES = tuple(name for name in OPERATORS if name != "Compiled")


def run(pool, name, split, num_workers):
    refused_as = {"ByHand": GradientNotReducedError, "Normalised": PerShardLossError}.get(name)
    check(pool.run("fsdp", name, split, num_workers), name, split, refused_as)


@pytest.mark.timeout(120)
@pytest.mark.sampled
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_exact_or_refused(pool, name, split, num_workers):
    run(pool, name, split, num_workers)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_four_workers(pool, name, split):
    run(pool, name, split, 4)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("split", SPLITS)
def test_compiled(pool, split):
    run(pool, "Compiled", split, 2)
