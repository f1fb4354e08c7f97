# SPDX-License-Identifier: Apache-2.0
"""Merges the metrics of several workers into one result: adds their sums up, and divides once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigurationError
from lockstep.keys import BATCH_COUNT, NUM_SAMPLES, WEIGHT
from lockstep.metrics.metric_values import (
    as_summand,
    is_array,
    is_same_value,
    read_numbers,
    shape_of,
)
from lockstep.metrics.weighted_mean import as_weight, merge_means, weighted_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lockstep.metrics.weighted_mean import WeightedMean

EPOCH: Final = "epoch"


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all workers into one weighted mean for each metric.

    Args:
        states: `AverageMeterCollection.state` of each worker, by rank.

    Returns:
        ``num_samples`` (summed); ``batch_count`` (the largest: workers share every global batch,
        and a worker that joined late saw fewer); for each metric ``k`` the mean over the workers
        that reported it, and ``last_k``, the mean over the workers that reported it in its latest
        step; of a metric that cannot be averaged, the lowest rank's value (`varying_metrics` names
        those that have several).
    """
    merged: dict[str, Any] = {
        BATCH_COUNT: max((state[BATCH_COUNT] for state in states), default=0),
        NUM_SAMPLES: sum(state[NUM_SAMPLES] for state in states),
    }
    latest: dict[str, Any] = {}
    for key in _keys_in_order(state["sums"] for state in states):
        # Of several shapes, the lowest rank's.
        means = _of_one_shape([state["sums"][key] for state in states if key in state["sums"]])
        merged[key], latest[f"last_{key}"] = merge_means(means)
    others = (item for state in states for item in state["others"].items())
    # `setdefault` keeps a metric that the user called `last_x`, a metric that is a number on any
    # rank, and of several other values the lowest rank's, which comes first.
    for key, value in (*latest.items(), *others):
        merged.setdefault(key, value)
    return merged


def varying_metrics(states: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that cannot be averaged and are not the same on all batches and workers.

    Of values that are no tensors or arrays, the latest of the workers are compared.

    Args:
        states: as of `merge`.
    """
    averaged = set[str]().union(*(state["sums"] for state in states))
    varied = set[str]().union(*(state["varied"] for state in states))
    for key in averaged:
        means = [state["sums"][key] for state in states if key in state["sums"]]
        if len(_of_one_shape(means)) < len(means):
            varied.add(key)
    return sorted(varied | (_varying([state["others"] for state in states]) - averaged))


def varying_results(passes: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """As `varying_metrics`, of what loops of the user's own returned.

    Args:
        passes: for each pass the results of the workers that ran it.
    """
    varying = set[str]().union(*map(_varying, passes))
    results = [result for each in passes for result in each]
    arrays = {key for result in results for key, value in result.items() if is_array(value)}
    return sorted(varying | (_varying(results) & arrays))


def _varying(results: Sequence[Mapping[str, Any]]) -> set[str]:
    varying = set()
    for key in _keys_in_order(results):
        values = [result[key] for result in results if key in result]
        summands = [as_summand(value) for value in values]
        is_averaged = len({shape_of(each) for each in summands if each is not None}) == 1
        if not is_averaged and not all(is_same_value(values[0], value) for value in values):
            varying.add(key)
    return varying


def merge_user_results(
    results: Sequence[Mapping[str, Any]], weights: Sequence[float]
) -> dict[str, Any]:
    """Merge the dicts that operators with their own ``train_epoch`` or ``validate`` returned.

    Args:
        results: each worker's dict, by rank. Never changed.
        weights: each worker's number of samples, used where its dict has no ``num_samples``.

    Returns:
        ``num_samples`` summed; ``batch_count`` and ``epoch`` by maximum; other numbers as
        means weighted by samples (or, where a dict has it, by its ``*weight``, which is
        summed), over the workers that have them (a plain mean if none of those saw a
        sample), and so tensors and arrays of numbers, element by element; of a value that cannot
        be averaged, the lowest rank's.

    Raises:
        ConfigurationError: not one weight per result.
        WeightError: a number of samples is negative, NaN or infinite.
    """
    if len(results) != len(weights):
        raise ConfigurationError(
            "every result needs one weight",
            expected=f"{len(results)} weights",
            got=f"{len(weights)}",
        )
    samples = [
        as_weight(result.get(NUM_SAMPLES, weight))
        for result, weight in zip(results, weights, strict=True)
    ]
    counts = [
        as_weight(result.get(WEIGHT, count)) for result, count in zip(results, samples, strict=True)
    ]
    merged: dict[str, Any] = {NUM_SAMPLES: sum(samples)}
    for key in _keys_in_order(results):
        held = [
            (result[key], n) for result, n in zip(results, counts, strict=True) if key in result
        ]
        numbers = [(as_summand(value), n) for value, n in held]
        shapes = [shape_of(number) for number, _ in numbers if number is not None]
        if len(set(shapes)) > 1 or (len(held) == 1 and shapes != [()]):
            numbers = []
        read = read_numbers(number for number, _ in numbers if number is not None)
        if key in (NUM_SAMPLES, WEIGHT):
            merged[key] = sum(samples if key == NUM_SAMPLES else counts)
        elif not read:
            merged[key] = held[0][0]
        elif key in (BATCH_COUNT, EPOCH):
            merged[key] = max(read)
        else:
            weights = [n for number, n in numbers if number is not None]
            merged[key] = weighted_mean(zip(read, weights, strict=True))
    return merged


def _of_one_shape(means: Sequence[WeightedMean]) -> list[WeightedMean]:
    """Those of `means` that can be added to the first one."""
    if not means[0].weight:
        return list(means)
    shape = shape_of(means[0].total)
    return [mean for mean in means if shape_of(mean.total) == shape]


def _keys_in_order(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))
