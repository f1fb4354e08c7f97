# SPDX-License-Identifier: Apache-2.0
"""The tests notice: each classic mistake, put back into a copy of the source, fails one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

EXACT = "tests/ranks/test_replicate_exact.py"
TABLE = "tests/ranks/test_oracle_table.py"


@dataclass(frozen=True)
class Mutation:
    """A mistake: in `file`, each old text becomes the new one; `tests` are to notice."""

    file: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


_DIVIDE = "if not self._divides or (sums is not None and self.layout.is_unit_weight(sums.weight)):"
_NEVER_DIVIDE = (_DIVIDE, "if True:")

MUTATIONS = {
    "no_division": Mutation(
        "sync/reducer.py",
        (
            ("self._share = 1.0 / group.size if divides and", "self._share = 1.0 if divides and"),
            _NEVER_DIVIDE,
        ),
        (f"{EXACT}::test_as_one_process[Plain-plain-even]",),
    ),
    "no_division_by_unequal_weights": Mutation(
        "sync/reducer.py",
        (_NEVER_DIVIDE,),
        (f"{EXACT}::test_accumulation_divides_once_by_all_weights[Accumulated-uneven-25]",),
    ),
    "division_twice": Mutation(
        "sync/reducer.py",
        (("bucket.pack(scale)", "bucket.pack(scale * self._share)"),),
        (f"{EXACT}::test_as_one_process[Plain-plain-even]",),
    ),
    "mean_of_the_ranks_means": Mutation(
        "sync/weighted_loss_scale.py",
        (
            (
                "share = weight / self.unit(WEIGHTED) if self.averages else float(weight > 0)",
                "share = float(weight > 0)",
            ),
        ),
        (f"{EXACT}::test_as_one_process[Plain-weighted-uneven]",),
    ),
    "mean_of_the_shards_means": Mutation(
        "operator/shard_results.py",
        (
            (
                "(_parse_weight(operator, given), BY_OWN) if is_own else self._count(shard, moved)",
                "(_parse_weight(operator, given), BY_OWN) if is_own else (1, BY_SAMPLES)",
            ),
        ),
        (f"{TABLE}::test_exact_or_refused[replicate-Plain-uneven-2]",),
    ),
    "missing_weight_at_the_root": Mutation(
        "sync/weighted_loss_scale.py",
        (("root.register_hook(lambda gradient: gradient * carried)", "pass"),),
        (f"{EXACT}::test_as_one_process[Plain-weighted-uneven]",),
    ),
    "missing_weight_of_a_plain_backward": Mutation(
        "sync/accumulation_window.py",
        (("            made.scale = made.weight\n", ""),),
        (f"{EXACT}::test_as_one_process[Plain-plain-uneven]",),
    ),
    "no_hook_on_the_first_parameter": Mutation(
        "sync/backward_listener.py",
        (
            (
                "slot: self._hook(slot) for slot in slots}",
                "slot: self._hook(slot) for slot in slots[1:]}",
            ),
        ),
        (f"{EXACT}::test_whichever_parameter_is_the_only_one_that_a_backward_reaches",),
    ),
    "no_hook_on_the_last_parameter": Mutation(
        "sync/backward_listener.py",
        (
            (
                "slot: self._hook(slot) for slot in slots}",
                "slot: self._hook(slot) for slot in slots[:-1]}",
            ),
        ),
        (f"{EXACT}::test_whichever_parameter_is_the_only_one_that_a_backward_reaches",),
    ),
    "buckets_as_they_come": Mutation(
        "sync/reducer.py",
        (
            (
                "                self._launch_complete()\n",
                "                if bucket is not self.layout.buckets[-1]:\n"
                "                    self._launch(bucket)\n",
            ),
            (
                "for bucket in self.layout.buckets[self._next :]:",
                "for bucket in [b for b in self.layout.buckets if not b.is_launched]:",
            ),
        ),
        (f"{EXACT}::test_as_one_process[Branches-weighted-uneven]",),
    ),
    "zeros_for_what_nobody_used": Mutation(
        "sync/reducer.py",
        (
            (
                "                if not used:\n                    slot.param.grad = None",
                "                if not used:\n                    slot.param.grad = slot.view",
            ),
        ),
        (f"{TABLE}::test_exact_or_refused[replicate-Idle-even-2]",),
    ),
}


def mutated(mutation: Mutation, source: Path) -> str:
    text = (source / "lockstep" / mutation.file).read_text(encoding="utf-8")
    for old, new in mutation.changes:
        assert text.count(old) == 1, f"{mutation.file} holds {text.count(old)} times: {old}"
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_the_place_to_put_the_mistake_is_still_there(mutation):
    compile(mutated(mutation, ROOT / "src"), mutation.file, "exec")


_RUN = """
import sys
import lockstep
assert lockstep.__file__.startswith(sys.argv[1]), lockstep.__file__
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def run(source: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `tests` of this repository with the lockstep that lies in `source`."""
    path = os.pathsep.join([str(source), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", _RUN, str(source), *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def source(tmp_path):
    copy = tmp_path / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.slow
@pytest.mark.timeout(110)
def test_without_a_mistake_they_pass(source):
    every = sorted({test for mutation in MUTATIONS.values() for test in mutation.tests})
    result = run(source, every)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(110)
@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_mistake_is_noticed(mutation, source):
    (source / "lockstep" / mutation.file).write_text(mutated(mutation, source), encoding="utf-8")
    result = run(source, list(mutation.tests))
    # 1: a test failed. Other codes would mean that no test ran, and negative ones a crash of
    # gloo's, which is what ranks in different collectives may end in.
    assert result.returncode == 1 or result.returncode < 0, result.stdout + result.stderr
    assert "1 failed" in result.stdout or result.returncode < 0, result.stdout
