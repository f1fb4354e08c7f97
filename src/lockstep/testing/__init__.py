# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests, lockstep's and users': parity with one process, failures, and bit flips.

They need torch, and no Ray.
"""

from lockstep.testing.bit_flips import Flip, flipped
from lockstep.testing.fault_injection import Strike, struck
from lockstep.testing.parity_assertion import assert_parity
from lockstep.testing.rank_threads import run_ranks

__all__ = ["Flip", "Strike", "assert_parity", "flipped", "run_ranks", "struck"]
