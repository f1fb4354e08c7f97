# SPDX-License-Identifier: Apache-2.0
"""The torchmetrics objects that an operator registered: updated here, merged by the driver."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import update_wrapper
from typing import Any, Final

import torch

from lockstep.errors import ConfigurationError, WrongTypeError
from lockstep.metrics.torchmetrics_merge import is_metric, metrics_in, states_of

_PREFIXES: Final = {"train": "train_", "validation": "val_"}


Mark = list[tuple[Any, int, dict[str, Any]]]
"""Metrics, each with the number of its updates and its states; for a list of rows, its length."""


def mark_metrics(metrics: Iterable[Any], *, may_reset: bool = False) -> Mark:
    """The counts of torchmetrics objects so far.

    Args:
        may_reset: what follows may reset metrics, which drops the rows that they keep: so the lists
            of rows are copied, and not their lengths alone.
    """
    copy_rows: Callable[[list[Any]], Any] = list if may_reset else len
    return [(each, each.update_count, _copy_states(each, copy_rows)) for each in metrics]


def restore_metrics(mark: Mark) -> None:
    """Set torchmetrics objects back to their counts at `mark`."""
    for metric, count, states in mark:
        metric._update_count, metric._computed = count, None
        for name, state in states.items():
            if isinstance(state, int):
                del getattr(metric, name)[state:]
            else:
                setattr(metric, name, list(state) if isinstance(state, list) else state.clone())


class RegisteredMetrics:
    """Metric objects by purpose ("train", "validation") and name.

    Every call of `train` or `validate` starts them from nothing, so one object may serve both.
    """

    def __init__(self) -> None:
        self._by_purpose: dict[str, dict[str, Any]] = {}

    def register(
        self, purpose: str, given: Any, device: torch.device, counts_nothing: Callable[[], bool]
    ) -> None:
        """Take `given` for `purpose`.

        Args:
            given: a metric, a ``MetricCollection``, or a mapping from names to such.
            device: of the metrics' states.
            counts_nothing: whether the current batch is another worker's, which counts it (see
                `ShardedLoader`'s module), or was counted before a recovery.

        Raises:
            WrongTypeError: something in it is no torchmetrics object.
            ConfigurationError: `purpose` has its metrics already.
        """
        if purpose in self._by_purpose:
            raise ConfigurationError(
                f"register_metrics({purpose}=...) was called twice", fix="call it once, with a dict"
            )
        named = dict(given) if isinstance(given, Mapping) else {"": given}
        for metric in named.values():
            if not _is_metric(metric):
                raise WrongTypeError(
                    f"register_metrics({purpose}=...) was given something else",
                    expected="a torchmetrics Metric or MetricCollection, or a dict of them",
                    got=f"{type(metric).__name__}: {metric!r:.80}",
                    fix="call it first: pass an instance" if isinstance(metric, type) else None,
                )
            metric.to(device)
            for each in metrics_in(metric):
                # The driver merges the states: no rank waits for another in the middle of a loop.
                each.distributed_available_fn = _never
                each.update = _CountedUpdate(each, counts_nothing)
            if not is_metric(metric):
                # After its first update a collection lets metrics of equal states share them for
                # good: after one that was skipped all would be equal.
                metric.update = _CountedUpdate(metric, counts_nothing)
        self._by_purpose[purpose] = named

    def begin_call(self) -> None:
        """Reset the metrics: their result is that of one `train` or `validate`."""
        for metric in self._distinct():
            metric.reset()

    def observe(self, purpose: str, output: Any, target: Any) -> None:
        """Count the model's output for a batch, as the default loops do."""
        for metric in self._by_purpose.get(purpose, {}).values():
            metric.update(output.detach() if isinstance(output, torch.Tensor) else output, target)

    def copy_to_cpu(self, purpose: str) -> dict[str, Any]:
        """Copies of the metrics on the CPU, by the key of their result."""
        prefix = _PREFIXES[purpose]
        return {
            f"{prefix}{name}": copy.deepcopy(metric).to("cpu")
            for name, metric in _flatten_collections(self._by_purpose.get(purpose, {}))
        }

    def mark(self, *purposes: str, may_reset: bool = False) -> Mark:
        """The counts so far, for `restore`, of the metrics of `purposes`; without any, of all.

        Args:
            may_reset: see `mark_metrics`.
        """
        every = [each for metric in self._distinct(*purposes) for each in metrics_in(metric)]
        return mark_metrics(every, may_reset=may_reset)

    def restore(self, mark: Mark) -> None:
        """Set the metrics back to their counts at `mark`."""
        restore_metrics(mark)

    def _distinct(self, *purposes: str) -> list[Any]:
        by_purpose = [self._by_purpose.get(each, {}) for each in purposes or self._by_purpose]
        every = [each for named in by_purpose for each in named.values()]
        return list({id(metric): metric for metric in every}.values())


def _is_metric(given: Any) -> bool:
    is_module = isinstance(given, torch.nn.Module) and callable(getattr(given, "update", None))
    return is_module and next(metrics_in(given), None) is not None


def _flatten_collections(named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each metric by its name, those of a collection one by one.

    Reading a collection's items also updates states that its metrics share.
    """
    for name, metric in named.items():
        if isinstance(metric, torch.nn.ModuleDict):
            for inner, each in metric.items():
                yield f"{name}_{inner}" if name else inner, each
        else:
            yield name or type(metric).__name__, metric


class _CountedUpdate:
    """The `update` of a registered object, without effect while `counts_nothing`.

    A copy of the object, pickled or not, has the `update` of its class: that of the original would
    count for the original.
    """

    def __init__(self, metric: Any, counts_nothing: Callable[[], bool]) -> None:
        update_wrapper(self, metric.update)
        self._metric = metric
        self._counts_nothing = counts_nothing
        self._update = metric.update

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not self._counts_nothing():
            self._update(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._metric, "update")


def _copy_states(metric: Any, copy_rows: Callable[[list[Any]], Any]) -> dict[str, Any]:
    return {
        name: copy_rows(state) if isinstance(state, list) else state.clone()
        for name, state in states_of(metric).items()
    }


def _never() -> bool:
    return False
