# SPDX-License-Identifier: Apache-2.0
"""Collects the values that a LightningModule logs, and merges them over the ranks.

During a pass over the data `LoggingCapture` replaces `self.log` of the module by a method that
collects the values, and gives each torchmetrics object lockstep's process group to gather over. At
the end of the pass all ranks exchange the collected values.

The values logged for a borrowed batch (see `lockstep.data.sharded_loader`) are dropped.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.integrations.lightning.logged_metrics import (
    LoggedMetrics,
    as_scalar,
    merge_ranks,
    parse_reduction,
)
from lockstep.integrations.lightning.module_factory import is_lightning
from lockstep.metrics.torchmetrics_merge import is_metric, merge_states, metrics_in, states_of
from lockstep.operator.object_transfer import all_gather
from lockstep.operator.registered_torchmetrics import mark_metrics, restore_metrics
from lockstep.tensor_copies import HostCopy
from lockstep.tensor_tree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from lockstep.group import Group

_TINY_WEIGHT: Final = 1e-100


class LoggingCapture:
    """Collects the values that one LightningModule logs.

    Args:
        module: the module.
        group: returns the ranks that log; after a failure they form another group.

    Attributes:
        step: the number of global batches before the current one.
        batch: the number of samples of the batch that the module computes on, or of all that the
            worker computes on in the step, 0 if they are borrowed; None between steps.
    """

    def __init__(self, module: nn.Module, group: Callable[[], Group]) -> None:
        self._module = module
        self._group = group
        self._of_call = LoggedMetrics()
        self._of_epoch: dict[str, LoggedMetrics] = {}
        self._metrics: list[Any] = []  # of the module; to find them takes too long for every step
        self._purpose = "train"
        self._seen = {"train": 0.0, "validation": 0.0}
        self._is_capturing = False
        self.step = 0
        self.batch: float | None = None

    @contextmanager
    def counting_for(self, num_samples: float, *, first_time: bool) -> Iterator[None]:
        """Weight the values logged inside by `num_samples`; 0 for a borrowed batch drops them."""
        outer, self.batch = self.batch, num_samples
        if first_time:
            self._seen[self._purpose] += num_samples
        # The rank that owns a borrowed batch counts its rows, so this rank restores its metrics.
        kept = [] if num_samples else _copy_states(self._module)
        try:
            yield
        finally:
            self.batch = outer
            _put_states_back(kept)

    @contextmanager
    def capturing(self, purpose: str) -> Iterator[None]:
        """Collect during one pass over (part of) an epoch of `purpose`, "train" or "validation".

        Without `begin_epoch` in it, an epoch goes on of which a part was logged before.

        At the end the module is as it was before: between two calls it may be sent to the driver or
        copied, and must not refer to this worker then.
        """
        self._purpose = purpose
        self._of_epoch.setdefault(purpose, LoggedMetrics())
        metrics = self._metrics = list(metrics_in(self._module))
        before = [(one, one.distributed_available_fn) for one in metrics]
        try:
            for one in metrics:
                # A value that an earlier pass has computed: a rank whose metric is not updated
                # would return it, while the others gather their states.
                one._computed = None
                one.distributed_available_fn = lambda: self._group().size > 1
                vars(one)["_sync_dist"] = partial(self._sync_states, one)
            with self._logging_to(self._log):
                yield
        finally:
            for one, available in before:
                one.distributed_available_fn = available
                del vars(one)["_sync_dist"]

    def _sync_states(self, metric: Any, *_: Any, **__: Any) -> None:
        """In the place of torchmetrics' own: gather a metric's states over lockstep's group.

        torchmetrics gathers tensor by tensor, and so needs lists of as many on every rank, which
        those that it does not join (of retrieval, of detection) are not.

        Collective:
            Every rank: see `all_gather`.

        Raises:
            NotAvailableError: within a step, in which a rank may compute several shards or none.
        """
        if self.batch is not None:
            raise NotAvailableError(
                "a metric is computed over all workers within a step",
                got=f"{type(metric).__name__}.compute()",
                cause="the workers compute their shards one by one, and one may have none",
                fix="self.log(name, metric), or metric.compute() in on_train_epoch_end or"
                " on_validation_epoch_end",
            )
        own = metric.update_count, states_of(metric)
        everyone = all_gather(self._group(), own, f"the state of {type(metric).__name__}")
        # Ranks without samples are left out, unless none has any.
        parts = [states for updates, states in everyone if updates] or [own[1]]
        merge_states(metric, [_on_device_of(metric, states) for states in parts])

    def begin_call(self) -> None:
        """Drop what was logged in the call before."""
        self._of_call = LoggedMetrics()

    def begin_epoch(self) -> None:
        """Drop what was logged in an epoch that did not come to its end."""
        for place in set(self._of_epoch[self._purpose].metrics.values()):
            metric: Any = self._module.get_submodule(place)
            metric.reset()
        self._forget_epoch()

    def _forget_epoch(self) -> None:
        self._of_epoch[self._purpose] = LoggedMetrics()
        self._seen[self._purpose] = 0.0

    def mark(self, *, may_reset: bool = False) -> Any:
        """What the module has logged so far, for `restore` should the step or call be undone.

        Args:
            may_reset: what follows may reset metrics, so that their rows are copied as well, in
                the host's memory.
        """
        if self._is_capturing and not may_reset:
            put_back = partial(restore_metrics, mark_metrics(self._metrics))
        else:
            # Of a call that is undone the end may have run, which gathers metrics and resets them.
            copy = HostCopy if may_reset else torch.clone
            put_back = partial(_put_states_back, _copy_states(self._module, copy))
        of_epoch = {purpose: logged.copy() for purpose, logged in self._of_epoch.items()}
        return self._of_call.copy(), of_epoch, dict(self._seen), put_back

    def restore(self, mark: Any) -> None:
        """Drop what the module has logged since `mark`."""
        self._of_call, self._of_epoch, self._seen, put_back = mark
        put_back()

    @contextmanager
    def discarding_outside_passes(self) -> Iterator[None]:
        """Discard values that a step logs when it is computed again to explain an error."""
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
        in_step = self._purpose == "train" and self.batch is not None
        on_step = in_step if on_step is None else on_step
        on_epoch = not in_step if on_epoch is None else on_epoch
        if is_metric(value):
            names = [name, f"{name}_epoch"] if on_step and on_epoch else [name]
            place = _submodule_name(value, self._module, name)
            for sums in (self._of_call, self._of_epoch[self._purpose]):
                sums.metrics.update(dict.fromkeys(names, place))
            return
        if self.batch == 0:
            return  # a borrowed batch: the rank that owns its samples logs them
        # A value between steps has the weight of all samples that its rank has seen in the epoch.
        # Before a rank's first batch the weight is tiny and not 0: a value counts if it is alone.
        weight = self.batch or self._seen[self._purpose] or _TINY_WEIGHT
        weight = weight if batch_size is None else float(batch_size)
        how, number = parse_reduction(reduce_fx, name), as_scalar(value, name)
        for sums in (self._of_call, self._of_epoch[self._purpose]):
            sums.add(name, number, how, weight, self.step, bool(on_step and on_epoch))

    def values_so_far(self) -> dict[str, float]:
        """The numbers logged in the epoch so far, equal on every rank; no metric objects.

        Collective:
            Every rank: one small exchange.
        """
        return merge_ranks(self._group().exchange(self._of_epoch[self._purpose].to_plain()))

    def end_pass(self, *, epoch_over: bool) -> tuple[dict[str, float], dict[str, float]]:
        """End the pass: the metrics of the call so far, and of the epoch, equal on every rank.

        Metric objects hold those of the epoch alone, in both.

        Collective:
            Every rank: one small exchange, and the gathers of the metric objects.
        """
        epoch = self._of_epoch[self._purpose]
        everyone = self._group().exchange([self._of_call.to_plain(), epoch.to_plain()])
        of_call, of_epoch = (merge_ranks([each[part] for each in everyone]) for part in (0, 1))
        # A rank without samples logged no metric objects, and still takes part in their gathers.
        names = dict(item for each in everyone for item in each[1]["metrics"].items())
        found = self._compute_metrics(names, reset=epoch_over)
        if epoch_over:
            self._forget_epoch()
        return {**of_call, **found}, {**of_epoch, **found}

    def _compute_metrics(self, names: dict[str, str], *, reset: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, place in names.items():
            metric: Any = self._module.get_submodule(place)
            with warnings.catch_warnings():
                # On a rank without samples torchmetrics warns that a metric was not updated.
                warnings.simplefilter("ignore")
                found[name] = float(as_scalar(metric.compute(), name))
        if reset:
            for place in set(names.values()):
                metric = self._module.get_submodule(place)
                metric.reset()
        return found


def _copy_states(
    module: nn.Module, copy: Callable[[torch.Tensor], Any] = torch.clone
) -> list[tuple[Any, dict[str, Any]]]:
    return [(metric, _copy_state(metric, copy)) for metric in metrics_in(module)]


def _put_states_back(copies: list[tuple[Any, dict[str, Any]]]) -> None:
    for metric, state in copies:
        vars(metric).update({name: _from_host(value) for name, value in state.items()})


def _from_host(value: Any) -> Any:
    return value.on_device() if isinstance(value, HostCopy) else value


def _copy_state(metric: Any, copy: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """A copy of the state of `metric`, whose update changes tensors and lists in place."""
    states = {
        name: copy(value) if isinstance(value, torch.Tensor) else list(value)
        for name, value in metric.metric_state.items()
    }
    plain = {name: value for name, value in vars(metric).items() if name not in states}
    return {**plain, **states}


def _on_device_of(metric: Any, states: Mapping[str, Any]) -> dict[str, Any]:
    def move(state: Any) -> Any:
        is_in_host_memory = metric.compute_on_cpu and isinstance(state, list)
        device = torch.device("cpu") if is_in_host_memory else metric.device
        return tree_map(lambda leaf: leaf.to(device) if torch.is_tensor(leaf) else leaf, state)

    return {name: move(state) for name, state in states.items()}


def _submodule_name(metric: Any, module: nn.Module, name: str) -> str:
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
