# SPDX-License-Identifier: Apache-2.0
"""`lockstep.testing.struck` leaves no directory behind."""

import os
import subprocess
import sys

PROGRAM = """
import os
from lockstep import TrainingOperator
from lockstep.testing import Strike, struck

struck(TrainingOperator, Strike("kill", rank=0, step=0, phase="forward"))
print(len(os.listdir(os.environ["TMPDIR"])))
"""


def test_its_directory_goes_with_the_program(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) == 1
    assert list(tmp_path.iterdir()) == []
