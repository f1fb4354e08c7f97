# SPDX-License-Identifier: Apache-2.0
"""A module of the program is edited while the run trains, and then a worker dies."""

import subprocess
import sys

import pytest

MODULE = """
import torch
from lockstep import TrainingOperator

FACTOR = 1.0

class Op(TrainingOperator):
    def setup(self, config):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
        data = torch.utils.data.TensorDataset(torch.ones(64, 2))
        self.register_data(train_loader=torch.utils.data.DataLoader(data, batch_size=2))

    def compute_loss(self, batch, batch_info):
        return FACTOR * self.model(batch[0]).square().mean()
"""

PROGRAM = """
import os, pathlib, signal
from lockstep import TorchTrainer
from ops import Op

with TorchTrainer(training_operator_cls=Op, num_workers=2, use_tqdm=False) as trainer:
    trainer.train(num_steps=2)
    module = pathlib.Path("ops.py")
    module.write_text(module.read_text().replace("FACTOR = 1.0", "FACTOR = 2.0"))
    os.kill(trainer.apply_all_workers(os.getpid)[1], signal.SIGKILL)
    for _ in range(4000):
        trainer.train(num_steps=1)
        if not trainer._workers._engine.workers.spares:
            break
    trainer.train(num_steps=1)
    print(trainer.status()["workers"], "worker goes on")
"""


@pytest.mark.slow
def test_a_new_worker_that_would_train_another_program_takes_no_part(tmp_path):
    (tmp_path / "ops.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "1 worker goes on" in done.stdout.splitlines()
    assert "another version of the program" in done.stderr
    assert "other source of ops" in done.stderr
