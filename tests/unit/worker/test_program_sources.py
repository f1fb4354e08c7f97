# SPDX-License-Identifier: Apache-2.0
"""A process says which version of the program's modules it has imported."""

import importlib
import sys
import zlib

import pytest

from lockstep.worker.program_sources import source_digests


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The operator's module, which imports another one, and leaves a third to others."""
    (tmp_path / "its_loss.py").write_text("FACTOR = 1\n")
    (tmp_path / "its_unused.py").write_text("")
    (tmp_path / "its_operator.py").write_text(
        "import json\nimport numpy\nfrom its_loss import FACTOR\nimport its_loss as held\n"
        "from lockstep import TrainingOperator\nclass Op(TrainingOperator): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("its_unused")
    yield importlib.import_module("its_operator").Op
    for name in ("its_operator", "its_loss", "its_unused"):
        del sys.modules[name]


def test_the_modules_of_the_operator_alone(program, tmp_path):
    files = {name: tmp_path / f"{name}.py" for name in ("its_operator", "its_loss")}
    expected = {name: zlib.crc32(file.read_bytes()) for name, file in files.items()}
    assert source_digests(program) == expected


def test_what_was_imported_counts_and_not_what_the_file_says_now(program, tmp_path):
    before = source_digests(program)
    (tmp_path / "its_loss.py").write_text("FACTOR = 2\n")
    assert source_digests(program) == before


def test_a_class_that_came_by_value_has_the_modules_that_its_methods_refer_to(program):
    held = sys.modules["its_loss"]
    names = {"__name__": "__main__", "held": held}
    exec("class ByValue:\n    def loss(self): return held.FACTOR", names)
    assert source_digests(names["ByValue"]).keys() == {"its_loss"}
