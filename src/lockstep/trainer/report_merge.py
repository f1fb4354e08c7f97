# SPDX-License-Identifier: Apache-2.0
"""Merges the reports of all workers into the result that the user reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigurationError, MixedWeightsError
from lockstep.keys import BATCH_COUNT, NUM_SAMPLES, WEIGHT
from lockstep.metrics import merge, merge_user_results
from lockstep.metrics.torchmetrics_merge import compute_merged, has_updates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.worker import Report


def merge_reports(reports: Sequence[Report]) -> dict[str, Any]:
    """Merge the reports of all workers into one dict, in which every sample counts once."""
    _refuse_mixed_weights(reports)
    result: dict[str, Any] = {NUM_SAMPLES: sum(report.samples for report in reports)}
    kept = {key for report in reports for key in _unchanged_metrics(report)}
    if kept:
        ours = merge([report.sums for report in reports])
        result.update({key: value for key, value in ours.items() if key in kept})
    own = [_own_results(report) for report in reports]
    result.update(_merge_by_samples(own, [report.samples for report in reports]))
    result.update(compute_merged([report.measured for report in reports]))
    result.pop(WEIGHT, None)
    result[BATCH_COUNT] = max(report.steps for report in reports)
    epochs = [report.epoch for report in reports if report.epoch is not None]
    if epochs:
        result["epoch"] = max(epochs)
    timers = [report.timers for report in reports if report.timers is not None]
    if timers:
        result["profile"] = _mean_timers(timers)
    return result


def refuse_unused_metrics(reports: Sequence[Report]) -> None:
    """Refuse a registered metric that was never updated: the result would silently lack it."""
    for name in dict.fromkeys(name for report in reports for name in report.measured):
        if not any(has_updates(report.measured[name]) for report in reports):
            raise ConfigurationError(
                "a registered metric was never updated",
                got=name,
                cause="a compute_loss, train_batch or validate_batch of your own does not do it",
                fix="call metric.update(output, target) in it",
            )


def _refuse_mixed_weights(reports: Sequence[Report]) -> None:
    """Refuse losses that workers weighed by different kinds of weights.

    A worker checks its own losses before the step; differences between workers show only here.
    """
    kinds = [report.weighed_by for report in reports]
    if len({kind for kind in kinds if kind is not None}) > 1:
        raise MixedWeightsError(
            "the workers' losses were weighed by different things, so their mean was wrong",
            got=", ".join(f"{kind} on rank {rank}" for rank, kind in enumerate(kinds)),
            cause="compute_loss brings a weight on some ranks only",
            fix=f"return loss, {{{WEIGHT!r}: number}} on every rank; load the last checkpoint",
        )


def _unchanged_metrics(report: Report) -> set[str]:
    """The metrics of lockstep's own loop that the user's loop around it did not change."""
    return {
        key
        for metrics, summary in zip(report.metrics, report.summaries, strict=True)
        for key, value in metrics.items()
        if _is_unchanged(key, value, summary)
    }


def _own_results(report: Report) -> dict[str, Any]:
    """The results that the user's own loop returned, or added to the results of lockstep's loop."""
    passes = [
        {key: value for key, value in metrics.items() if not _is_unchanged(key, value, summary)}
        for metrics, summary in zip(report.metrics, report.summaries, strict=True)
    ]
    return _merge_by_samples(passes, report.samples_by_pass)


def _merge_by_samples(results: Sequence[dict[str, Any]], samples: Sequence[int]) -> dict[str, Any]:
    """As `merge_user_results`, but ``num_samples`` only if a user's loop returned it."""
    if not any(results):
        return {}
    merged = merge_user_results(results, samples)
    if not any(NUM_SAMPLES in each for each in results):
        del merged[NUM_SAMPLES]
    return merged


def _is_unchanged(key: str, after: Any, summary: dict[str, Any] | None) -> bool:
    """Whether the user's loop returned a metric as it is in the `summary` of lockstep's loop."""
    if summary is None or key not in summary:
        return False
    before = summary[key]
    # NaN is not equal to itself, and comparing tensors of several elements gives no answer.
    if before is after:
        return True
    if isinstance(before, float) and isinstance(after, float):
        return before == after or (before != before and after != after)
    return type(before) is type(after) and isinstance(after, int | str) and before == after


def _mean_timers(timers: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in timers for name in each)
    means: dict[str, float] = {}
    for name in names:
        values = [each[name] for each in timers if name in each]
        means[name] = sum(values) / len(values)
    return means
