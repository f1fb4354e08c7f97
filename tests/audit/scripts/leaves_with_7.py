# SPDX-License-Identifier: Apache-2.0
"""Says what it is given, and leaves with 7."""

import os
import sys

print(sys.argv, __name__, __file__, os.getcwd(), sys.path[0])
sys.exit(7)
