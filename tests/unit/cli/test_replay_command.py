# SPDX-License-Identifier: Apache-2.0
"""How ``lockstep replay`` ends where it cannot compute the step."""

import os
import sys

import pytest

from lockstep.cli import main

PROGRAM = """
import torch
from lockstep import TrainingOperator
from lockstep.errors import ConfigurationError

class Ruled(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(1, 1)
        self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=torch.nn.MSELoss(),
        )
        if config.get("misused"):
            raise ConfigurationError("this was misused")
        x = torch.linspace(0, 1, 8).unsqueeze(1)
        data = torch.utils.data.TensorDataset(x, 2 * x)
        self.register_data(train_loader=torch.utils.data.DataLoader(data, 4))
"""


@pytest.mark.parametrize(
    ("option", "code", "said"),
    [
        ("--shard=9", 2, "the run has no such shard"),
        ("--breakpoint=ruled.py:999", 2, "no breakpoint can stand there"),
        ("--set=misused=true", 1, "this was misused"),
    ],
)
def test_wrong_usage_and_faults_of_the_operator_s_own(
    tmp_path, monkeypatch, capsys, option, code, said
):
    (tmp_path / "ruled.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "ruled", raising=False)
    assert main(["train", "ruled.py:Ruled", "--checkpoint-dir=run", "--checkpoint-every=1"]) == 0
    assert main(["replay", "run", "--step=2", option]) == code
    assert said in capsys.readouterr().err
