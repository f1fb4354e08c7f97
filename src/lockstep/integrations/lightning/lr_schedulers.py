# SPDX-License-Identifier: Apache-2.0
"""Parses what `configure_optimizers` returns, and steps the learning rate schedulers in it.

`parse_configure_optimizers` reads all the forms that `configure_optimizers` may return;
`SchedulerStepper` steps the schedulers, by batch, by epoch or by a metric, as Lightning does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.integrations.lightning.step_closure import BY_MANUAL_OPTIMIZATION
from lockstep.sync.optimizer_inspection import needs_closure

if TYPE_CHECKING:
    from collections.abc import Callable

_FORMS: Final = (
    "an optimizer; [optimizer]; ([optimizer], [schedulers]); or"
    ' {"optimizer": ..., "lr_scheduler": scheduler or its dict, "monitor": "metric"}'
)


@dataclass
class SchedulerConfig:
    """A scheduler and when it steps, with the attributes of Lightning's ``LRSchedulerConfig``.

    Attributes:
        scheduler: an object with a method `step`.
        interval: "step" (optimizer steps of the epoch) or "epoch".
        frequency: the number of intervals between two steps of the scheduler.
        monitor: the metric that a plateau scheduler follows.
        strict: whether an epoch that did not log the monitored metric is an error.
        reduce_on_plateau: whether the scheduler's `step` takes the metric.
        name: the name for Lightning's loggers, which a module may read.
        last_metric_epoch: the last epoch in which a plateau scheduler was given a metric.
        within_epoch: an epoch, and the metric of the latest validation in the middle of it.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False
    name: str | None = None
    last_metric_epoch: int = field(default=-1, init=False)
    within_epoch: tuple[int, Any] | None = field(default=None, init=False)


def parse_configure_optimizers(
    result: Any, where: str, *, is_manual: bool
) -> tuple[list[torch.optim.Optimizer], list[SchedulerConfig]]:
    """Read the optimizers and the schedulers from the `result` of `configure_optimizers`.

    Args:
        result: what the hook returned.
        where: the module's class.
        is_manual: the module steps optimizers and schedulers itself.

    Raises:
        NotAvailableError: `result` has LBFGS; or several optimizers, or one that needs a closure,
            where Lightning steps them.
        ConfigurationError: `result` has no optimizer, or none of Lightning's forms.
    """
    if result is None:
        raise ConfigurationError(
            "configure_optimizers returned no optimizer", where=where, expected=_FORMS
        )
    optimizers, schedulers, monitor = _split_result(result, where)
    if len(optimizers) != 1 and not is_manual:
        raise NotAvailableError(
            f"{len(optimizers)} optimizers need manual optimisation",
            where=f"{where}.configure_optimizers",
            fix="self.automatic_optimization = False in __init__, and self.manual_backward(loss)"
            " and optimizer.step() in training_step; or one optimizer with several parameter"
            " groups",
        )
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise NotAvailableError(
            "LBFGS is not supported: it computes the loss several times a step",
            where=f"{where}.configure_optimizers",
            fix="another optimizer, or a TrainingOperator with a train_batch of its own",
        )
    closures = [type(each).__name__ for each in optimizers if needs_closure(each)]
    if closures and not is_manual:
        raise NotAvailableError(
            f"{closures[0]} needs manual optimisation: it computes the loss itself",
            where=f"{where}.configure_optimizers",
            cause="its step has to be given a closure, and the gradients are there before the step",
            fix=BY_MANUAL_OPTIMIZATION,
        )
    configs = [_parse_scheduler(each, monitor, where) for each in schedulers]
    if not is_manual:
        _require_monitors(configs, where)
    return optimizers, configs


def _split_result(result: Any, where: str) -> tuple[list[Any], list[Any], str | None]:
    if _is_optimizer(result):
        return [result], [], None
    if isinstance(result, Mapping):
        return (
            [_optimizer_in(result, where)],
            _schedulers_in(result),
            result.get("monitor"),
        )
    if isinstance(result, Sequence) and result:
        pair = len(result) == 2 and isinstance(result[0], list | tuple)
        if pair and all(map(_is_optimizer, result[0])):
            second = result[1]
            return list(result[0]), list(second) if isinstance(second, list) else [second], None
        if all(isinstance(each, Mapping) for each in result):
            optimizers = [_optimizer_in(each, where) for each in result]
            return optimizers, [one for each in result for one in _schedulers_in(each)], None
        if all(map(_is_optimizer, result)):
            return list(result), [], None
    raise _unknown_form_error(f"{type(result).__name__}: {result!r:.80}", where)


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def _schedulers_in(result: Mapping[str, Any]) -> list[Any]:
    return [] if result.get("lr_scheduler") is None else [result["lr_scheduler"]]


def _optimizer_in(result: Mapping[str, Any], where: str) -> Any:
    extra = result.keys() - {"optimizer", "lr_scheduler", "monitor", "frequency"}
    if extra or not _is_optimizer(result.get("optimizer")):
        raise _unknown_form_error(f"a dict with {sorted(result)}", where)
    return result["optimizer"]


def _unknown_form_error(got: str, where: str) -> ConfigurationError:
    return ConfigurationError(
        "configure_optimizers returned something that is no configuration",
        where=where,
        expected=_FORMS,
        got=got,
    )


def _parse_scheduler(given: Any, monitor: str | None, where: str) -> SchedulerConfig:
    wanted = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    known = {each.name for each in fields(SchedulerConfig) if each.init}
    extra = sorted(wanted.keys() - known)
    scheduler = wanted.get("scheduler")
    if extra or not callable(getattr(scheduler, "step", None)):
        raise ConfigurationError(
            "configure_optimizers returned a scheduler that cannot be understood",
            where=where,
            expected=f"a scheduler, or a dict with the keys {sorted(known)}",
            got=f"unknown keys {extra}" if extra else f"{scheduler!r:.80}",
        )
    wanted.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    wanted["monitor"] = wanted.get("monitor") or monitor
    schedule = SchedulerConfig(**wanted)
    if schedule.interval not in ("step", "epoch") or schedule.frequency < 1:
        raise ConfigurationError(
            "a scheduler steps at an interval that does not exist",
            where=where,
            expected='"interval": "step" or "epoch", "frequency": 1 or more',
            got=f'"interval": {schedule.interval!r}, "frequency": {schedule.frequency!r}',
        )
    return schedule


def _require_monitors(schedulers: Sequence[SchedulerConfig], where: str) -> None:
    for each in schedulers:
        if each.reduce_on_plateau and each.monitor is None:
            raise ConfigurationError(
                "a scheduler that waits for a plateau needs a metric to watch",
                where=where,
                got=type(each.scheduler).__name__,
                fix='"monitor": "val_loss" in the dict that configure_optimizers returns',
            )
        if each.reduce_on_plateau and each.interval == "step":
            raise NotAvailableError(
                "a scheduler that waits for a plateau cannot step within an epoch",
                where=where,
                got=f'{type(each.scheduler).__name__} with "interval": "step"',
                cause="metrics are means over all workers, and known when an epoch has ended",
                fix='"interval": "epoch"; or self.automatic_optimization = False and'
                " scheduler.step(value) in training_step",
            )


class SchedulerStepper:
    """Steps the schedulers of one module.

    Args:
        items: the schedulers, from `parse_configure_optimizers`.
        step: the module's ``lr_scheduler_step(scheduler, metric)``.
    """

    def __init__(self, items: list[SchedulerConfig], step: Callable[[Any, Any], None]) -> None:
        self.items = items
        self._step = step

    @property
    def has_plateaus(self) -> bool:
        """Whether a scheduler steps on a metric, which a validation may log."""
        return any(each.reduce_on_plateau for each in self.items)

    def after_step(self, index: int) -> None:
        """Step the schedulers that are due after the step on batch `index` of the epoch."""
        self._step_due("step", index + 1)

    def after_epoch(self, epoch: int) -> None:
        """Step the schedulers that are due after the last batch of `epoch`."""
        self._step_due("epoch", epoch + 1)

    def _step_due(self, interval: str, count: int) -> None:
        for each in self.items:
            mine = each.interval == interval and not each.reduce_on_plateau
            if mine and count % each.frequency == 0:
                self._step(each.scheduler, None)

    def after_metrics(
        self, epoch: int, metrics: Mapping[str, Any], *, epoch_over: bool = True
    ) -> None:
        """Step the plateau schedulers on the metrics of `epoch`, or of a validation after it.

        Args:
            epoch_over: False for a validation within the epoch: its metrics count at the epoch's
                end, if none comes there.
        """
        for each in self.items:
            watched = each.monitor
            if not each.reduce_on_plateau or watched is None or watched not in metrics:
                continue
            if epoch_over:
                self._follow(each, epoch, metrics[watched])
            else:
                each.within_epoch = epoch, metrics[watched]

    def _follow(self, plateau: SchedulerConfig, epoch: int, metric: Any) -> None:
        if plateau.last_metric_epoch < epoch and _is_due(plateau, epoch):
            self._step(plateau.scheduler, metric)
        plateau.last_metric_epoch = epoch

    def use_metrics_within(self, epoch: int) -> None:
        """Step the plateaus for which no validation came behind `epoch` on the last one in it."""
        for each in self.items:
            if each.within_epoch is not None and each.within_epoch[0] == epoch:
                self._follow(each, *each.within_epoch)

    def miss_metrics(self, epoch: int) -> None:
        """Go on without the metrics of `epoch`, which an earlier process has trained, and warn."""
        self.use_metrics_within(epoch)
        for each in self.items:
            is_behind = each.reduce_on_plateau and each.last_metric_epoch < epoch
            if is_behind and _is_due(each, epoch):
                each.last_metric_epoch = epoch
                warnings.warn(
                    f"{type(each.scheduler).__name__} has not stepped for epoch {epoch}: the run"
                    f" went on behind that epoch's last step, and its {each.monitor!r} is not in"
                    " the checkpoint. If validate() logs it, call trainer.validate() after a resume"
                    " and before trainer.train()",
                    stacklevel=2,
                )

    def check_monitored(self, epoch: int) -> None:
        """Before `epoch`: raise an error unless every plateau that was due had its metric."""
        for each in self.items:
            is_strict = each.reduce_on_plateau and each.strict
            has_metric = each.last_metric_epoch >= epoch - 1
            if not is_strict or has_metric or not _is_due(each, epoch - 1):
                continue
            raise ConfigurationError(
                f"{type(each.scheduler).__name__} watches {each.monitor!r}, which was not logged in"
                " the last epoch",
                cause="no trainer.validate() came after trainer.train(), or it went over a part of"
                " the validation data alone (num_steps); or validation_step has returned the metric"
                " and not logged it: validate() reports it, and no scheduler sees it",
                fix=f"self.log({each.monitor!r}, ...) in validation_step, and trainer.validate()"
                ' after each trainer.train(); or "strict": False beside the monitor',
            )

    def state_dict(self) -> list[Any]:
        """For each scheduler its metrics' epochs, which its own state does not contain."""
        return [(each.last_metric_epoch, each.within_epoch) for each in self.items]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        for each, epochs in zip(self.items, state, strict=True):
            # In states of earlier versions there is the last epoch alone.
            last, within = (epochs, None) if isinstance(epochs, int) else epochs
            each.last_metric_epoch, each.within_epoch = last, within


def _is_due(scheduler: SchedulerConfig, epoch: int) -> bool:
    """Whether a scheduler that steps by epochs steps behind `epoch`."""
    return (epoch + 1) % scheduler.frequency == 0
