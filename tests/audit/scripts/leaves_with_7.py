# SPDX-License-Identifier: Apache-2.0
"""Says what it is given, and leaves with 7."""

import os
import sys

# In one piece: where output is not buffered, two ranks' lines would be mixed up.
sys.stdout.write(f"{sys.argv} {__name__} {__file__} {os.getcwd()} {sys.path[0]}\n")
sys.exit(7)
