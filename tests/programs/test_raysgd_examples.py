# SPDX-License-Identifier: Apache-2.0
"""RaySGD's own examples, as programs of ours: they train with one worker and with two."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "raysgd"

FALLING = {
    "dcgan": ["loss_d"],
    "cifar": ["train_loss"],
    "lightning_mnist": ["train_loss", "val_loss"],
}

SAYS = {
    "dcgan": "drew 16 images of 8 x 8 pixels",
    "cifar": "val_accuracy",
    "lightning_mnist": "the model: LitMNIST",
}


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == FALLING.keys() == SAYS.keys()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("example", FALLING)
def test_the_loss_goes_down(example, workers, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{example}.py"), "--num-workers", str(workers)],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS[example] in done.stdout
    for name in FALLING[example]:
        losses = [float(each) for each in re.findall(rf"{name} ([\d.]+)", done.stdout)]
        assert len(losses) == 3
        assert sorted(losses, reverse=True) == losses
