# SPDX-License-Identifier: Apache-2.0
"""What tests/conftest.py does for every test: it catches leaks, and gives turns."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LEAKING_TESTS = """
import os, threading
import torch
import torch.distributed as dist

STOP = threading.Event()

def test_tidy():
    thread = threading.Thread(target=str)
    thread.start()

def test_environment():
    os.environ["LEFT_BEHIND"] = "1"

def test_working_directory(tmp_path):
    os.chdir(tmp_path)

def test_default_dtype():
    torch.set_default_dtype(torch.float64)

def test_intra_op_threads():
    torch.set_num_threads(torch.get_num_threads() + 1)

def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)

def test_default_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_thread():
    threading.Thread(target=STOP.wait, name="forgotten").start()

def test_cleaning_up_is_blamed_on_nobody_else():
    pass

def teardown_module():
    STOP.set()
    dist.destroy_process_group()
"""

CAUGHT = {
    "test_environment": "environment variables LEFT_BEHIND",
    "test_working_directory": "working_directory",
    "test_default_dtype": "default_dtype",
    "test_intra_op_threads": "intra_op_threads",
    "test_deterministic_algorithms": "deterministic_algorithms",
    "test_default_process_group": "default_process_group",
    "test_thread": "thread 'forgotten' still runs",
}


@pytest.mark.slow
def test_each_kind_of_leak_is_blamed_on_the_test_that_left_it(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_leaking.py").write_text(LEAKING_TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rE", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    blamed = {
        line.split("::")[1].split(" - ")[0]: line
        for line in done.stdout.splitlines()
        if line.startswith("ERROR ")
    }
    assert blamed.keys() == CAUGHT.keys(), done.stdout
    for test, words in CAUGHT.items():
        assert words in done.stdout, test


TESTS_OF_TWO_PROCESSES = """
import pathlib, time
import pytest

def spend():
    began = time.monotonic()
    time.sleep(0.2)
    return f"{began} {time.monotonic()}"

@pytest.mark.alone
@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    pathlib.Path(f"alone{number}").write_text(spend())

@pytest.mark.parametrize("number", range(12))
def test_other(number):
    pathlib.Path(f"other{number}").write_text(spend())
"""


@pytest.mark.slow
def test_nothing_runs_beside_a_test_that_is_marked_alone(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    alone\n    slow\n")
    (tmp_path / "test_turns.py").write_text(TESTS_OF_TWO_PROCESSES)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)

    def spans(kind: str) -> list[tuple[float, float]]:
        read = [file.read_text().split() for file in sorted(tmp_path.glob(f"{kind}*"))]
        return [(float(began), float(ended)) for began, ended in read]

    alone, others = spans("alone"), spans("other")
    assert (len(alone), len(others)) == (3, 12)
    pairs = [(a, b) for a in alone for b in alone + others if a != b]
    assert [(a, b) for a, b in pairs if a[0] < b[1] and b[0] < a[1]] == []
    # Unmarked tests do run side by side, or the line above would show nothing.
    assert any(a[0] < b[1] and b[0] < a[1] for a in others for b in others if a != b)
