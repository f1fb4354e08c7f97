# SPDX-License-Identifier: Apache-2.0
"""Every way to synchronise x every split x 1 to 4 workers x everything a gradient depends on.

Each cell is exact in float64, or refused with a code before an optimizer steps. `make test`
runs a choice of cells that holds every pair of values, `make test-all` all of them. FSDP wants
a process for each rank: see `procs/test_sharded_table.py`.
"""

from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import ConfigurationError, GradientNotReducedError, PerShardLossError
from lockstep.operator.sync_setup import _BY_NAME
from lockstep.sync import replicate
from ranks.table import SPLITS, cells, check, on_threads, pairwise
from ranks.table_operators import OPERATORS

SYNCS = tuple(
    sync for sync in ("replicate", "ddp", "parameter_server", "data_parallel") if sync in _BY_NAME
)
AXES = (SYNCS, tuple(OPERATORS), tuple(SPLITS), (1, 2, 3, 4))

WITH_PEERS = ("replicate", "ddp", "parameter_server")


def refusal(sync: str, name: str, num_workers: int) -> type[Exception] | None:
    """What cannot be exact, and how that is said; everything else is exact."""
    if name == "ByHand" and sync in WITH_PEERS and num_workers > 1:
        return GradientNotReducedError
    if name == "Normalised" and sync == "ddp":
        return ValueError  # by torch, which wraps it on GPUs only
    if name == "Normalised" and sync == "data_parallel" and num_workers > 1:
        return ConfigurationError
    # One process that has the whole batch at once can normalise by it.
    if name == "Normalised" and sync in WITH_PEERS:
        return PerShardLossError
    return None


QUICK = pairwise(*AXES)


# A compiled model asks the parameters of replicas, which are no leaves, for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("sync", "name", "split", "num_workers"),
    [
        pytest.param(*cell, id="-".join(map(str, cell)), marks=[] if cell in QUICK else [slow])
        for slow in (pytest.mark.slow,)
        for cell in cells(*AXES)
    ],
)
def test_exact_or_refused(sync, name, split, num_workers):
    if name == "Compiled":
        torch.compiler.reset()  # it remembers so many models of one kind, and no more
    results = on_threads(sync, name, split, num_workers)
    check(results, name, split, refusal(sync, name, num_workers))


def test_the_quick_choice_holds_every_pair():
    for (i, one), (j, other) in combinations(enumerate(AXES), 2):
        for pair in cells(one, other):
            assert any((cell[i], cell[j]) == pair for cell in QUICK), pair
    assert len(QUICK) < len(cells(*AXES)) / 2


def test_sync_batch_norm_on_the_cpu_is_refused_by_torch_before_the_step():
    """Which is why the table has no row with a joint loss; see `test_cuda.py`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))
        sync = replicate(model)
        with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
            sync.backward(model(torch.ones(5, 4)).sum(), weight=5)
        assert all(parameter.grad is None for parameter in model.parameters())
        sync.detach()
    finally:
        dist.destroy_process_group()
