# SPDX-License-Identifier: Apache-2.0
"""What the driver does when a worker dies or hangs.

The driver decides, workers report. A worker's death breaks the group of all; the survivors
leave it, say how far they have come, and form the next generation, with a spare in the place
of the lost worker or without it. Nothing that was committed is lost.
"""

from lockstep.recovery.policy import Policy

__all__ = ["Policy"]
