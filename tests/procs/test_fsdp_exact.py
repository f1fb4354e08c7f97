# SPDX-License-Identifier: Apache-2.0
"""In shards, N ranks have the gradients and the weights of one process on the same batch."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.procs.fsdp_ranks import EXACT, REFUSALS, SHARES, WAYS, is_slow, oracle

import harness
from harness import assert_equal_on_all_ranks, assert_same

RANKS = 3

# Starting its ranks takes long; `test_sharded_table.py` has the quick choice.
pytestmark = pytest.mark.slow


def results_of(folder: Path, choice: str, num_ranks: int = RANKS) -> list[dict]:
    """The results of all cases, by rank: processes, started once."""
    tests = Path(harness.__file__).parent
    paths = [str(tests.parent / "src"), str(tests), str(tests.parent)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    program = str(Path(__file__).parent / "fsdp_ranks.py")
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rest = [str(folder), str(meeting.port), choice]
    running = [
        subprocess.Popen([sys.executable, program, str(rank), *rest], env=environment)
        for rank in range(num_ranks)
    ]
    assert [process.wait(timeout=100) for process in running] == [0] * num_ranks
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("fast"), "fast")


@pytest.fixture(scope="module")
def further_ranks(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("slow"), "slow")


def table(*, slow: bool):
    rows = itertools.product(EXACT, WAYS, SHARES)
    return [
        pytest.param(program, way, split, id=f"{program.__name__}-{way}-{split}")
        for program, way, split in rows
        if is_slow(program, way, split) == slow
    ]


def compare(ranks, program, way, split) -> None:
    results = [found[f"{program.__name__}-{way}-{split}"] for found in ranks[: len(SHARES[split])]]
    for result in results:
        assert not isinstance(result, str), result
    true_gradients, true_weights = oracle(program)
    for step, true in enumerate(true_gradients):
        assert_equal_on_all_ranks([seen[step] for seen, _ in results])
        assert_same(results[0][0][step], true)
    assert len(results[0][0]) == len(true_gradients)
    assert_equal_on_all_ranks([after for _, after in results])
    assert_same(results[0][1], true_weights)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("program", "way", "split"), table(slow=False))
def test_as_one_process(ranks, program, way, split):
    compare(ranks, program, way, split)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("program", "way", "split"), table(slow=True))
def test_further_combinations(further_ranks, program, way, split):
    compare(further_ranks, program, way, split)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("program", "code"), REFUSALS.items(), ids=lambda item: getattr(item, "__name__", item)
)
def test_refused_on_every_rank(ranks, program, code):
    assert [found[program.__name__] for found in ranks[:2]] == [code, code]


@pytest.mark.timeout(120)
def test_a_rank_that_leaves_frees_its_peers(ranks):
    assert ranks[1]["a_rank_that_leaves"] == "LS000"
    assert ranks[0]["a_rank_that_leaves"] == "LS601"
