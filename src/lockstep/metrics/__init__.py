# SPDX-License-Identifier: Apache-2.0
"""What came out, weighted by what went in.

Workers keep sums and weights, never means: a mean of means is wrong as soon as two workers
saw different numbers of samples. `AverageMeterCollection.state` hands the sums over, and
`merge` divides once. The four classes have the names, arguments and results of RaySGD 1.3.

Invariants:

- A key counts only where it was reported: workers without it neither dilute nor drop it.
- Weight zero means "did not happen": a borrowed batch leaves no trace but its step.
- NaN is a result. It is never filtered out, or a diverged run would report a good loss.
- Nothing here waits for a device until `state` or `summary` is called.
"""

from lockstep.metrics.average_meters import AverageMeter as AverageMeter
from lockstep.metrics.average_meters import AverageMeterCollection as AverageMeterCollection
from lockstep.metrics.merge_over_workers import merge as merge
from lockstep.metrics.merge_over_workers import merge_user_results as merge_user_results
from lockstep.metrics.timers import TimerCollection as TimerCollection
from lockstep.metrics.timers import TimerStat as TimerStat

__all__ = [
    "AverageMeter",
    "AverageMeterCollection",
    "TimerCollection",
    "TimerStat",
    "merge",
    "merge_user_results",
]
