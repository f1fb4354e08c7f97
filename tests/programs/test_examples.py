# SPDX-License-Identifier: Apache-2.0
"""The examples run as printed in them, and do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def printed(example: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(line: str) -> list[float]:
    return [float(each) for each in re.findall(r"\d+(?:\.\d+)?", line)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_language_model(precision, tmp_path):
    arguments = ["--epochs", "3", "--paragraphs", "700", "--precision", precision]
    shown = printed("language_model.py", *arguments, cwd=tmp_path)
    rows = [numbers(line) for line in shown.splitlines()[1:4]]
    # 630 paragraphs are 27 batches: the last step of an epoch takes one batch, the others two.
    assert [row[:3] for row in rows] == [[1, 630, 27], [2, 630, 27], [3, 630, 27]]
    training, held_out = ([row[column] for row in rows] for column in (3, 4))
    assert sorted(training, reverse=True) == training
    # Six and a half bits tell 97 characters apart; their frequencies alone need about 4.5.
    assert held_out[-1] < 3.8
    assert "\ndef " in shown


def test_same_bits(tmp_path):
    shown = printed("same_bits.py", "--epochs", "1", "--workers", "1", "3", cwd=tmp_path)
    rows = [line.split() for line in shown.splitlines()[3:5]]
    assert rows[0][1] == rows[1][1]
    assert rows[0][3] != rows[1][3]
    assert float(rows[1][2]) == 0.0 < float(rows[1][4]) < 1e-4
    assert "with reproducible=True 1 digest, without it 2" in shown


def test_linear_regression(tmp_path):
    assert "y = 2.0" in printed("linear_regression.py", cwd=tmp_path)


def test_gan(tmp_path):
    shown = printed("gan.py", "--epochs", "2", cwd=tmp_path)
    assert "epoch   2" in shown
    assert shown.count("@") > 0


def test_digits(tmp_path):
    shown = printed("digits.py", cwd=tmp_path)
    assert (tmp_path / "out" / "digits.pt").is_file()
    assert "ten digits of the validation set" in shown
