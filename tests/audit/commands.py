# SPDX-License-Identifier: Apache-2.0
"""The audit as a user starts it."""

import subprocess
import sys


def run(*arguments, **options):
    """Python with those arguments, to its end."""
    command = [sys.executable, *map(str, arguments)]
    settings = {"capture_output": True, "text": True, "timeout": 55, "check": False}
    return subprocess.run(command, **settings | options)


def audit(*arguments, **options):
    """Run the command and wait for it. As the installed one, it does not look where it stands."""
    return run("-P", "-m", "lockstep.cli", "audit", *arguments, **options)
