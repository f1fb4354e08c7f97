# SPDX-License-Identifier: Apache-2.0
"""Torch must not have been imported before the script says so."""

import sys

assert "torch" not in sys.modules
