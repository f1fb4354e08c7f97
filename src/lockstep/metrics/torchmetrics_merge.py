# SPDX-License-Identifier: Apache-2.0
"""Merges the states of torchmetrics objects over the workers, and computes each metric once.

A worker sends its metric objects, and exchanges nothing while it trains. The driver merges their
states (those that a LightningModule computes, each worker by itself) by each metric's own
``dist_reduce_fx``, as torchmetrics does it between ranks, with two differences: the states of ranks
without samples are left out, so that such a rank neither waits nor counts; and lists of rows may
have any lengths, and hold anything.

torchmetrics itself is not imported here: a program that has such an object has imported it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep.metrics.metric_values import is_scalar


def is_metric(value: Any) -> bool:
    """Whether `value` is an object of torchmetrics: it has the attribute `_reductions`."""
    return hasattr(value, "_reductions")


def metrics_in(module: Any) -> Iterator[Any]:
    """The metrics among a module's submodules and itself, each once, in a fixed order."""
    return (each for each in module.modules() if is_metric(each))


def has_updates(metric: Any) -> bool:
    return any(each.update_count > 0 for each in metrics_in(metric))


def compute_merged(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute each metric over all workers.

    Args:
        by_rank: each worker's metrics by name, on the CPU; not changed.

    Returns:
        The result of `compute` by the metric's name: numbers as Python's, tensors as they are; a
        dict (of a value for each class, say) key by key. Metrics without an update are left out.
    """
    values: dict[str, Any] = {}
    for name in dict.fromkeys(name for own in by_rank for name in own):
        updated = [own[name] for own in by_rank if name in own and has_updates(own[name])]
        if not updated:
            continue
        value = _merge(updated).compute()
        parts = value if isinstance(value, Mapping) else {"": value}
        for key, part in parts.items():
            values[f"{name}_{key}" if key else name] = part.item() if is_scalar(part) else part
    return values


def _merge(metrics: Sequence[Any]) -> Any:
    whole = copy.deepcopy(metrics[0])
    if len(metrics) > 1:
        for own, *parts in zip(metrics_in(whole), *map(metrics_in, metrics), strict=True):
            own._computed = None
            own._update_count = sum(part.update_count for part in parts)
            merge_states(own, [states_of(part) for part in parts])
    return whole


def states_of(metric: Any) -> dict[str, Any]:
    """What `metric` has added up, by name: tensors, and lists of rows."""
    return {name: getattr(metric, name) for name in metric._reductions}


def merge_states(own: Any, parts: Sequence[Mapping[str, Any]]) -> None:
    """Give the metric `own` the states of several like it, merged.

    Args:
        parts: of each of them what `states_of` returned, on one device; of one alone, it is taken
            as it is.
    """
    for name, reduce in own._reductions.items():
        states = [part[name] for part in parts]
        if len(states) == 1:
            merged = states[0]
        elif isinstance(states[0], list):
            # Lists of rows: the metric's own `compute` concatenates them.
            merged = [rows for state in states for rows in state]
        else:
            stacked = torch.stack(states)
            merged = stacked if reduce is None else reduce(stacked)
        setattr(own, name, merged)
