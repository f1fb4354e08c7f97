# SPDX-License-Identifier: Apache-2.0
"""The examples do what they print."""

import importlib.util
import re
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  # sets variables when it is first imported

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def program(name):
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_contrastive(capsys):
    program("contrastive").main(["--num-workers", "2", "--epochs", "10"])
    accuracy = re.search(r"found among 297: ([\d.]+)%", capsys.readouterr().out)
    assert float(accuracy[1]) > 10
