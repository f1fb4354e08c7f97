# SPDX-License-Identifier: Apache-2.0
"""Captures what a LightningModule logs, and lets its torchmetrics objects gather over the ranks.

While one pass over the data runs, `self.log` of the module is replaced by a method that collects
the values, and each metric object is given our process group to gather over. When the pass ends,
all ranks exchange what they collected.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import ConfigurationError
from lockstep.integrations.lightning.logged_metrics import (
    LoggedMetrics,
    merged,
    reduction_named,
    scalar,
)
from lockstep.integrations.lightning.module_factory import is_lightning
from lockstep.metrics.torchmetrics_merge import is_metric, metrics_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lockstep.group import Group

_NOTHING_SEEN: Final = 1e-100


class LoggingCapture:
    """What one LightningModule logs.

    Attributes:
        step: global batches before the one that is computed.
        batch: samples of the batch that the module computes on, 0 if it is borrowed; None between
            batches.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._module = module
        self._group = group
        self._passing = LoggedMetrics()
        self._of_epoch: dict[str, LoggedMetrics] = {}
        self._purpose = "train"
        self._seen = {"train": 0.0, "validation": 0.0}
        self._is_capturing = False
        self.step = 0
        self.batch: float | None = None

    @contextmanager
    def of_batch(self, num_samples: float, *, first_time: bool) -> Iterator[None]:
        """The module's code runs for a batch that counts `num_samples`."""
        self.batch = num_samples
        if first_time:
            self._seen[self._purpose] += num_samples
        # The worker that owns a borrowed batch counts its rows: here they leave no trace.
        kept = [] if num_samples else [(one, _state_of(one)) for one in metrics_in(self._module)]
        try:
            yield
        finally:
            self.batch = None
            for metric, state in kept:
                vars(metric).update(state)

    @contextmanager
    def capturing(self, purpose: str) -> Iterator[None]:
        """Collect during one pass over (part of) an epoch of `purpose`, "train" or "validation".

        Afterwards the module is as it was: a module that is sent to the driver, or copied, between
        two calls must not hold on to this worker.
        """
        self._purpose, self._passing = purpose, LoggedMetrics()
        self._of_epoch.setdefault(purpose, LoggedMetrics())
        metrics = list(metrics_in(self._module))
        before = [(one, one.distributed_available_fn, one.dist_sync_fn) for one in metrics]
        gather = _gather_over(self._group)
        try:
            for one in metrics:
                one.distributed_available_fn = lambda: self._group.size > 1
                one.dist_sync_fn = gather
            with self._logging_to(self._log):
                yield
        finally:
            for one, available, sync in before:
                one.distributed_available_fn, one.dist_sync_fn = available, sync

    @contextmanager
    def discarding_outside_passes(self) -> Iterator[None]:
        """Discard what a step logs that is computed once more, to explain an error."""
        if self._is_capturing:
            yield
            return
        with self._logging_to(lambda *_, **__: None):
            yield

    @contextmanager
    def _logging_to(self, log: Callable[..., None]) -> Iterator[None]:
        modules = [one for one in self._module.modules() if is_lightning(one, "LightningModule")]
        try:
            self._is_capturing = True
            for one in modules:
                vars(one)["log"] = log
            yield
        finally:
            self._is_capturing = False
            for one in modules:
                vars(one).pop("log", None)

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """`LightningModule.log`: every rank's samples count, whatever `sync_dist` says."""
        if is_metric(value):
            for sums in (self._passing, self._of_epoch[self._purpose]):
                sums.metrics[name] = _place_of(value, self._module, name)
            return
        if self.batch == 0:
            return  # a borrowed batch: the worker that owns its samples logs them
        # Between batches a value counts as much as the samples that its rank has seen in the
        # epoch. Before a rank's first batch its value counts, but next to nothing beside others.
        weight = self.batch or self._seen[self._purpose] or _NOTHING_SEEN
        weight = weight if batch_size is None else float(batch_size)
        in_step = self._purpose == "train" and self.batch is not None
        on_step = in_step if on_step is None else on_step
        on_epoch = not in_step if on_epoch is None else on_epoch
        how, number = reduction_named(reduce_fx, name), scalar(value, name)
        for sums in (self._passing, self._of_epoch[self._purpose]):
            sums.add(name, number, how, weight, self.step, bool(on_step and on_epoch))

    def conclude(self, *, epoch_over: bool) -> tuple[dict[str, float], dict[str, float]]:
        """The metrics of this pass, and of the epoch so far; the same on every rank.

        Collective:
            Every rank: one small exchange, and what the metric objects gather.
        """
        epoch = self._of_epoch[self._purpose]
        everyone = self._group.exchange([self._passing.plain(), epoch.plain()])
        of_pass, of_epoch = (merged([each[part] for each in everyone]) for part in (0, 1))
        # A rank without samples has not logged them, and still takes part in their gathers.
        names = dict(item for each in everyone for item in each[1]["metrics"].items())
        found = self._computed(names, reset=epoch_over)
        if epoch_over:
            self._of_epoch[self._purpose] = LoggedMetrics()
            self._seen[self._purpose] = 0.0
        return {**of_pass, **found}, {**of_epoch, **found}

    def _computed(self, names: dict[str, str], *, reset: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, place in names.items():
            metric: Any = self._module.get_submodule(place)
            with warnings.catch_warnings():
                # torchmetrics warns of a metric that was not updated, on a rank without samples.
                warnings.simplefilter("ignore")
                found[name] = float(scalar(metric.compute(), name))
        if reset:
            for place in set(names.values()):
                metric = self._module.get_submodule(place)
                metric.reset()
        return found


def _state_of(metric: Any) -> dict[str, Any]:
    """A copy of what an update of `metric` changes: it changes tensors and lists in place."""
    states = {
        name: value.clone() if isinstance(value, torch.Tensor) else list(value)
        for name, value in metric.metric_state.items()
    }
    plain = {name: value for name, value in vars(metric).items() if name not in states}
    return {**plain, **states}


def _place_of(metric: Any, module: nn.Module, name: str) -> str:
    place: str
    for place, one in module.named_modules():
        if one is metric:
            return place
    raise ConfigurationError(
        f"self.log({name!r}, ...) was given a metric that the module does not hold",
        got=type(metric).__name__,
        cause="nobody would gather it over the workers, or reset it",
        fix="make it an attribute in __init__: self.accuracy = torchmetrics.Accuracy(...)",
    )


def _gather_over(peers: Group) -> Any:
    """A ``dist_sync_fn`` of torchmetrics: every rank's tensor, whose leading lengths may differ."""

    def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        kind = str(tensor.dtype).removeprefix("torch.")
        everyone = peers.exchange([list(tensor.shape), kind])
        full = [each for each in everyone if 0 not in each[0]]
        if not full:
            return [tensor.clone() for _ in everyone]
        # A rank that saw nothing brings an empty tensor of one dimension and another dtype.
        largest = [max(sizes) for sizes in zip(*(shape for shape, _ in full), strict=True)]
        padded = tensor.new_zeros(largest, dtype=getattr(torch, full[0][1]))
        if tensor.numel():
            padded[tuple(map(slice, tensor.shape))] = tensor
        return [
            one[:0] if 0 in shape else one[tuple(map(slice, shape))]
            for one, (shape, _) in zip(peers.all_gather(padded), everyone, strict=True)
        ]

    return gather
