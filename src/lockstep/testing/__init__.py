# SPDX-License-Identifier: Apache-2.0
"""For our tests and for your own: parity with one process, and fault injection.

Needs torch only, never Ray.
"""

from lockstep.testing.fault_injection import Strike, struck
from lockstep.testing.parity_assertion import assert_parity, run_ranks

__all__ = ["Strike", "assert_parity", "run_ranks", "struck"]
