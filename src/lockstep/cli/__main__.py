# SPDX-License-Identifier: Apache-2.0
"""``python -m lockstep.cli``: the same as ``lockstep``."""

import sys

from lockstep.cli import main

if __name__ == "__main__":
    sys.exit(main())
