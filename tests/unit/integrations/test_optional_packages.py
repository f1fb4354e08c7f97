# SPDX-License-Identifier: Apache-2.0
"""The error for a package that is not installed names the command that installs it."""

import subprocess
import sys

import pytest

TUNE = """
from lockstep import TorchTrainer, TrainingOperator
class Operator(TrainingOperator): ...
TorchTrainer.as_trainable(training_operator_cls=Operator)
"""
CASES = {
    "tensorboard": (
        "from lockstep.integrations.loggers import *; TensorBoardLogger('x')",
        "loggers",
    ),
    "mlflow": ("from lockstep.integrations.loggers import *; MLflowLogger()", "loggers"),
    "prometheus_client": (
        "from lockstep.integrations.loggers import *; RayMetricsLogger()",
        "cluster",
    ),
    "pandas": (TUNE, "tune"),
    "shtab": ("from lockstep.cli import main; main(['completion', 'bash'])", "cli"),
}


@pytest.mark.slow
@pytest.mark.parametrize("package", CASES)
def test_says_what_to_type(package):
    line, extra = CASES[package]
    program = f"import sys; sys.modules[{package!r}] = None\n{line}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f'pip install "lockstep-train[{extra}]"' in done.stderr
    assert "[LS003]" in done.stderr
