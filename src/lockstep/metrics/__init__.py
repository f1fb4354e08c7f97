# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run: means over all workers, weighted by samples, and timers.

Workers keep sums and weights, never means: a mean of means is wrong as soon as two workers
saw different numbers of samples. `AverageMeterCollection.state` returns a worker's sums, and
`merge` divides those of all workers once. The four classes have the names, arguments and results
of RaySGD 1.3.

Invariants:

- A metric's mean is over the workers that reported it; the others change nothing.
- A batch with weight 0 (a borrowed one, see `lockstep.data.sharded_loader`) changes no metric, and
  counts as a step.
- NaN is a result. It is never filtered out, or a diverged run would report a good loss.
- Only `state` and `summary` wait for a device.
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
