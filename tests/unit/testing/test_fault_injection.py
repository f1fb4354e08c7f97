# SPDX-License-Identifier: Apache-2.0
"""`lockstep.testing.struck` strikes whatever is trained on, and leaves no directory behind."""

import os
import subprocess
import sys

import pytest
from tests.unit.trainer.programs import (
    BATCH,
    SAMPLES,
    STEPS_PER_EPOCH,
    Regression,
    Streaming,
    by_hand,
    problem,
    same,
    trainer,
    weights,
)
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lockstep.testing import Strike, struck

PROGRAM = """
import os
from lockstep import TrainingOperator
from lockstep.testing import Strike, struck

struck(TrainingOperator, Strike("kill", rank=0, step=0, phase="forward"))
print(len(os.listdir(os.environ["TMPDIR"])))
"""


@pytest.mark.timeout(240)
def test_its_directory_goes_with_the_program(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=200
    )
    assert int(done.stdout) == 1
    assert list(tmp_path.iterdir()) == []


class OnPart(Regression):
    """As ``random_split`` gives it: its samples are read a batch at once."""

    def data(self):
        return DataLoader(Subset(TensorDataset(*problem()), range(SAMPLES)), BATCH)


class OneByOne(Dataset):
    __getitems__ = None  # switched off, as torch allows it

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        features, targets = problem()
        return features[index], targets[index]


class OnSamples(Regression):
    def data(self):
        return DataLoader(OneByOne(), BATCH)


@pytest.mark.parametrize("phase", ["data", "forward"])
@pytest.mark.parametrize("operator", [Regression, OnPart, OnSamples, Streaming])
def test_a_strike_comes_whatever_the_data_is_read_from(operator, phase):
    with trainer(struck(operator, Strike("raise", 0, 2, phase))) as one:
        with pytest.raises(RuntimeError, match=f"struck in step 2, {phase}"):
            one.train()
        assert one.status()["step"] == 2
        one.train()
        assert same(weights(one.get_model()), by_hand(STEPS_PER_EPOCH))
