# SPDX-License-Identifier: Apache-2.0
"""Merges the reports of all workers into the result that the user reads."""

from __future__ import annotations

import warnings
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from lockstep.error_texts import LOAD_LAST
from lockstep.errors import ConfigurationError, MixedWeightsError
from lockstep.keys import BATCH_COUNT, NUM_SAMPLES, WEIGHT
from lockstep.metrics import merge, merge_user_results
from lockstep.metrics.merge_over_workers import varying_metrics, varying_results
from lockstep.metrics.torchmetrics_merge import compute_merged, has_updates
from lockstep.operator.shard_results import BY_OWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.worker import PassResult, Report


def merge_reports(reports: Sequence[Report]) -> dict[str, Any]:
    """Merge the reports of all workers into one dict, in which every sample counts once."""
    _refuse_mixed_weights(reports)
    result: dict[str, Any] = {NUM_SAMPLES: sum(report.samples for report in reports)}
    passes = [each for report in reports for each in report.passes]
    # A user's loop around lockstep's may leave the value that is there on some ranks, as 0 * 100 is
    # 0: one that any of them has changed is the user's on all of them.
    own = set[str]().union(*(each.keys_of_own for each in passes))
    if any(each.sums is not None for each in passes):
        # A loop may return nothing on some ranks, or in some epochs. Not the names in the passes:
        # one that is repeated behind its last batch has none.
        left_out = set[str]().union(*(each.keys_left_out for each in passes))
        left_out -= {key for each in passes for key in each.metrics}
        ours = merge([report.sums for report in reports])
        result.update({key: ours[key] for key in ours if key not in own | left_out})
    over_call = set[str]().union(*(each.over_call for each in passes))
    # Of what cannot be averaged, the latest pass of the lowest rank.
    latest_first = [each for report in reports for each in reversed(report.passes)]
    result.update(_merge_own(latest_first, own - over_call))
    for each in passes:  # the latest pass of a worker last
        result.update({key: each.metrics[key] for key in own & each.over_call})
    result.update(compute_merged([report.torchmetrics for report in reports]))
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
    for name in dict.fromkeys(name for report in reports for name in report.torchmetrics):
        if not any(has_updates(report.torchmetrics[name]) for report in reports):
            raise ConfigurationError(
                "a registered metric was never updated",
                got=name,
                cause="a compute_loss, train_batch or validate_batch of your own does not do it",
                fix="call metric.update(output, target) in it",
            )


def warn_of_varying_metrics(reports: Sequence[Report]) -> None:
    """Warn of metrics that cannot be averaged, of which the result holds one of several values.

    Python shows the same warning once.
    """
    passes = [each for report in reports for each in report.passes]
    own = set[str]().union(*(each.keys_of_own for each in passes))
    varying = set[str]()
    if any(each.sums is not None for each in passes):
        varying.update(varying_metrics([report.sums for report in reports]))
        varying -= own
    if own:
        varying.update(varying_results(_results_by_pass(reports, own)))
    for name in sorted(varying):
        warnings.warn(
            f"the metric {name!r} is not the same on all batches and workers, and cannot be"
            " averaged: the result holds one worker's. Numbers are averaged, and tensors and"
            " arrays of numbers that keep one shape (up to 65,536 elements); for anything else"
            " register a torchmetrics object (register_metrics), whose states are merged",
            UserWarning,
            stacklevel=2,
        )


def _results_by_pass(reports: Sequence[Report], own: set[str]) -> list[list[dict[str, Any]]]:
    """The metrics `own` of each pass, from the last one on, of the workers that ran it."""
    # From the end: a worker that joined late has not run the first ones.
    rows = zip_longest(*(reversed(report.passes) for report in reports))
    return [[_only(own, each.metrics) for each in row if each is not None] for row in rows]


def _only(keys: set[str], metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if key in keys}


def _refuse_mixed_weights(reports: Sequence[Report]) -> None:
    """Refuse losses that workers weighed by different kinds of weights.

    A worker checks its own losses before the step; differences between workers show only here.
    """
    kinds = [report.weighed_by for report in reports]
    if len({kind == BY_OWN for kind in kinds if kind is not None}) > 1:
        raise MixedWeightsError(
            "the workers' losses were weighed by different things, so their mean was wrong",
            got=", ".join(f"{kind} on rank {rank}" for rank, kind in enumerate(kinds)),
            cause="compute_loss brings a weight on some ranks only",
            fix=f"return loss, {{{WEIGHT!r}: number}} on every rank; {LOAD_LAST}",
        )


def _merge_own(passes: Sequence[PassResult], own: set[str]) -> dict[str, Any]:
    """Merge the metrics of the user's own loop, `own`, over the passes that have them.

    They count for the samples of their pass, or for what the loop says. One that lockstep's loop
    had averaged everywhere, by tokens maybe, counts for what it is an average of.
    """
    if not own:
        return {}
    results = [_only(own, each.metrics) for each in passes]
    if not any(results):
        return {}
    merged = merge_user_results(results, [each.samples for each in passes])
    if own.isdisjoint((NUM_SAMPLES, WEIGHT)):
        for key in merged.keys() & own:
            weights = _weights_of_ours([each for each in passes if key in each.metrics], key)
            if weights is not None:
                values = [{key: each[key]} for each in results if key in each]
                merged[key] = merge_user_results(values, weights)[key]
    if NUM_SAMPLES not in own:
        del merged[NUM_SAMPLES]
    return merged


def _weights_of_ours(passes: Sequence[PassResult], key: str) -> list[float] | None:
    """What lockstep's loops have weighed `key` by; None if one of them did not average it."""
    found = [weight for each in passes if (weight := each.weight_of(key)) is not None]
    if len(found) < len(passes):
        return None
    latest = max(step for step, _ in found)
    return [weight if step == latest else 0 for step, weight in found]


def _mean_timers(timers: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in timers for name in each)
    means: dict[str, float] = {}
    for name in names:
        values = [each[name] for each in timers if name in each]
        means[name] = sum(values) / len(values)
    return means
