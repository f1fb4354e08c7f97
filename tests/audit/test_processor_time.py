# SPDX-License-Identifier: Apache-2.0
"""What the processors have done for a rank, by which it is told from one that hangs."""

import subprocess
import sys

COMPUTES = "import time\nwhile time.process_time() < 0.4: pass"

IN_A_SESSION = f"""
import subprocess, sys
from lockstep.audit.processor_time import computed_in_session_s
before = computed_in_session_s()
subprocess.run([sys.executable, "-S", "-c", {COMPUTES!r}], check=True)
print(computed_in_session_s() - before)
"""


def test_what_children_have_computed_counts_after_they_have_ended():
    """A rank may wait for one short program after another, and compute nothing itself."""
    command = [sys.executable, "-c", IN_A_SESSION]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True)
    assert float(done.stdout) >= 0.35, done.stderr
