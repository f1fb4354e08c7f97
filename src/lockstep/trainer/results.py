# SPDX-License-Identifier: Apache-2.0
"""From what N workers report to what the user reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.keys import BATCH_COUNT, NUM_SAMPLES
from lockstep.metrics import merge, merge_user_results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.worker import Report


def merged(reports: Sequence[Report], *, with_epoch: bool, profile: bool) -> dict[str, Any]:
    """One dict for all workers: every sample counts once, whoever saw it."""
    result: dict[str, Any] = {}
    own = [_own_results(report) for report in reports]
    weights = [float(report.samples) for report in reports]
    if any(own):
        result.update(merge_user_results(own, weights))
    sums = [_sums(report) for report in reports]
    if any(state is not None for state in sums):
        result.update(merge([state for state in sums if state is not None]))
    result.setdefault(NUM_SAMPLES, sum(report.samples for report in reports))
    result[BATCH_COUNT] = max(report.steps for report in reports)
    return _finished(result, reports, with_epoch, profile)


def one_by_one(
    reports: Sequence[Report], *, with_epoch: bool, profile: bool
) -> list[dict[str, Any]]:
    """One dict a worker, of its own samples only."""
    return [merged([report], with_epoch=with_epoch, profile=profile) for report in reports]


def _sums(report: Report) -> dict[str, Any] | None:
    """The sums behind the default loops' metrics; cumulative over the call, so the last."""
    states = [metrics.sums for metrics in report.metrics if hasattr(metrics, "sums")]
    return states[-1] if states else None


def _own_results(report: Report) -> dict[str, Any]:
    """What the user's own loop returned, or added to what the default loop did."""
    passes: list[dict[str, Any]] = []
    for metrics in report.metrics:
        from_default = getattr(metrics, "summary", {})
        passes.append(
            {
                key: value
                for key, value in metrics.items()
                if key not in from_default or not _same(from_default[key], value)
            }
        )
    weights = [float(samples) for samples in report.samples_by_pass]
    return merge_user_results(passes, weights) if any(passes) else {}


def _same(before: Any, after: Any) -> bool:
    # NaN is not equal to itself, and comparing tensors of several elements gives no answer.
    if before is after:
        return True
    if isinstance(before, float) and isinstance(after, float):
        return before == after or (before != before and after != after)
    return type(before) is type(after) and isinstance(after, int | str) and before == after


def _finished(
    result: dict[str, Any], reports: Sequence[Report], with_epoch: bool, profile: bool
) -> dict[str, Any]:
    if with_epoch:
        result["epoch"] = max(report.epoch for report in reports)
    if profile:
        result["profile"] = _mean_timers([report.timers for report in reports])
    return result


def _mean_timers(timers: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in timers for name in each)
    means: dict[str, float] = {}
    for name in names:
        values = [each[name] for each in timers if name in each]
        means[name] = sum(values) / len(values)
    return means
