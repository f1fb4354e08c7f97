# SPDX-License-Identifier: Apache-2.0
"""What `lockstep audit` says about bypassed.py.

python docs/programs/audited.py [--html FILE]
"""

import subprocess
import sys
from pathlib import Path

FOUND_SOMETHING = 65


def main() -> None:
    command = [sys.executable, "-m", "lockstep.cli", "audit", *sys.argv[1:], "bypassed.py"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    # The report comes after what the program prints, and does not get into it.
    print(done.stderr, end="")
    if done.returncode != FOUND_SOMETHING:
        raise SystemExit(f"lockstep audit ended with {done.returncode}")


if __name__ == "__main__":
    main()
