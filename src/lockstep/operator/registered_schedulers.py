# SPDX-License-Identifier: Apache-2.0
"""Finds, checks and steps the schedulers of a run: those that `register` was given, and those that
`setup` left in `self`."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from lockstep._torch_compat import schedulers_within
from lockstep.checkpoint.plain_values import plain_state
from lockstep.errors import ConfigurationError, WrongTypeError
from lockstep.keys import SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_MANUAL
from lockstep.operator.loop_protocols import Operator
from lockstep.operator.mixed_precision import members_of
from lockstep.operator.training_parts import has_state

if TYPE_CHECKING:
    import torch

    from lockstep.operator.training_parts import TrainingParts

_log = logging.getLogger("lockstep")

_METRICS: Final = {"metric", "metrics"}
"""The parameters of a scheduler's `step` that take what is given to `trainer.update_scheduler`."""

_COUNTERS: Final = frozenset(
    {"epoch", "epochs", "epoch_idx", "current_epoch", "cur_epoch", "last_epoch", "num_epochs"}
    | {"step", "steps", "step_num", "num_steps", "global_step", "current_step", "step_idx"}
    | {"update", "updates", "num_update", "num_updates", "n", "i", "t", "it", "iter", "iteration"}
    | {"iterations", "batch", "batch_idx", "num_samples", "time"}
)
"""The parameters of a scheduler's `step` that count: no metric is meant for them."""


def parse_schedulers(
    schedulers: Any, step_freq: str | None, *, has_own_epoch: bool = False
) -> list[Any]:
    """`schedulers` as a list, checked to step when `step_freq` says.

    Args:
        has_own_epoch: `train_epoch` is overridden; then nothing steps them at an epoch's end.
    """
    if schedulers is None:
        return []
    steps_by_itself = step_freq not in (None, SCHEDULER_STEP_MANUAL)
    steps_by_itself &= not (has_own_epoch and step_freq == SCHEDULER_STEP_EPOCH)
    items = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
    for item in items:
        if isinstance(item, type) or not callable(getattr(item, "step", None)):
            raise WrongTypeError(
                "register(schedulers=...) was given something that cannot step",
                expected="a torch.optim.lr_scheduler object, or a list of them",
                got=f"{type(item).__name__}: {item!r:.80}",
            )
        needed = _needed_by_step(item)
        if needed and steps_by_itself:
            if not (needed <= _METRICS or _takes_metric_by_place(item)):
                raise _unknown_argument_error(item, needed, step_freq)
            raise ConfigurationError(
                f"{type(item).__name__} needs a metric, so it cannot step by itself",
                got=f"scheduler_step_freq={step_freq!r}",
                fix='TorchTrainer(..., scheduler_step_freq="manual") and'
                " trainer.update_scheduler(metric) after each validate()",
            )
    if items and step_freq is None:
        raise ConfigurationError(
            "schedulers were registered, but nothing says when they step",
            expected='scheduler_step_freq="batch", "epoch" or "manual"',
            got="scheduler_step_freq=None",
            fix='TorchTrainer(..., scheduler_step_freq="epoch")',
        )
    return items


def refuse_foreign_schedulers(registered: TrainingParts) -> None:
    """Refuse schedulers of optimizers that were not registered: the run would ignore them."""
    # Compare groups and not optimizers: a wrapper of an optimizer shares its groups.
    groups = ids_of_groups(registered)
    for number, scheduler in enumerate(registered.schedulers):
        optimizer = getattr(scheduler, "optimizer", None)
        held = getattr(optimizer, "param_groups", None)
        if held and not any(id(group) in groups for group in held):
            raise ConfigurationError(
                "a scheduler belongs to an optimizer that is not registered",
                where=f"scheduler {number} ({type(scheduler).__name__})",
                got=f"a {type(optimizer).__name__} that is none of register(optimizers=...)",
                cause="the optimizer was made twice, or the scheduler's own one was left out: the"
                " learning rate of the run would never change",
                fix="make the scheduler from the optimizer that is registered",
            )


def ids_of_groups(registered: TrainingParts) -> set[int]:
    return {id(group) for each in registered.optimizers for group in each.param_groups}


def take_schedulers(operator: Operator, registered: TrainingParts) -> None:
    """Step, save and load `self.scheduler` as if it had been registered: RaySGD stepped it.

    A scheduler of another name is refused, unless a loop of the user's own may step it. Then it is
    saved, loaded and undone like a GradScaler, which such a loop steps as well.

    Raises:
        ConfigurationError: nothing says when it steps, or the default loop was left a scheduler
            of another name.
    """
    known = _ids_with_chained(registered.schedulers)
    found = [
        (name, scheduler)
        for name, value in vars(operator).items()
        for scheduler in _schedulers_in(value, registered.optimizers)
        if id(scheduler) not in known
    ]
    step_freq = operator.scheduler_step_freq
    own_loop = operator._lockstep_overrides_loop()
    has_own_epoch = operator._lockstep_overrides(Operator.train_epoch)
    if own_loop or step_freq is not None:
        for name, scheduler in found:
            if name == "scheduler":
                registered.schedulers += (
                    [scheduler]
                    if step_freq is None
                    else parse_schedulers(scheduler, step_freq, has_own_epoch=has_own_epoch)
                )
        known = _ids_with_chained(registered.schedulers)
    left = [(name, scheduler) for name, scheduler in found if id(scheduler) not in known]
    if left and not own_loop:
        name, scheduler = left[0]
        raise ConfigurationError(
            f"self.{name} is a learning-rate scheduler that nothing steps",
            where=type(operator).__name__,
            got=f"{type(scheduler).__name__}, not registered,"
            f" and scheduler_step_freq={step_freq!r}",
            fix="self.register(..., schedulers=...) in setup, and"
            ' TorchTrainer(..., scheduler_step_freq="epoch"), "batch", or "manual" if code of your'
            " own steps it",
        )
    registered.stepped_by_loop = _with_state(operator, registered, left)
    context = operator._lockstep.context
    if context.world_rank == 0 and not context.is_trial:
        for scheduler in registered.schedulers:
            if not has_state(scheduler):
                _log.warning(
                    "%s is neither saved nor undone with a step that fails: it has no state_dict()"
                    " and load_state_dict(). In a run that resumes, and in a worker that joins, it"
                    " begins anew",
                    type(scheduler).__name__,
                )


def _with_state(
    operator: Operator, registered: TrainingParts, schedulers: Sequence[tuple[str, Any]]
) -> list[Any]:
    """Those of `schedulers` that can be saved with their optimizer, and the GradScalers.

    Args:
        schedulers: each with the name of its attribute.
    """
    groups = ids_of_groups(registered)
    held = [
        (name, each)
        for name, each in schedulers
        if has_state(each) and any(id(group) in groups for group in _groups_of(each))
    ]
    held += [
        (name, each)
        for name, value in vars(operator).items()
        for each in members_of(value)
        if isinstance(each, GradScaler)
    ]
    distinct = {id(each): (name, each) for name, each in held}.values()
    return [each for name, each in distinct if _has_plain_state(name, each)]


def _groups_of(scheduler: Any) -> Iterable[Any]:
    # A scheduler of the user's own may come without an optimizer.
    groups: Iterable[Any] = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    return groups


def _has_plain_state(name: str, stepper: Any) -> bool:
    """Whether a checkpoint can hold its state; where not, a warning says that nothing keeps it."""
    try:
        # In this order: a model in a state is refused before it would be copied.
        state = stepper.state_dict()
        plain_state(state)
        copy.deepcopy(state)
    except Exception as error:  # of the user's `state_dict`, or of what is in it
        _log.warning(
            "self.%s (%s) is neither saved nor undone with a step that fails: its state_dict() is"
            " not one that a checkpoint can hold (%s: %s)",
            *(name, type(stepper).__name__, type(error).__name__, error),
        )
        return False
    return True


def _schedulers_in(value: Any, optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """The schedulers of `optimizers` in an attribute."""
    return [
        item
        for item in members_of(value)
        if isinstance(item, LRScheduler)
        # Schedulers of other packages do not derive from torch's class.
        or (
            callable(getattr(item, "step", None))
            and any(getattr(item, "optimizer", None) is each for each in optimizers)
        )
    ]


def _ids_with_chained(schedulers: Sequence[Any]) -> set[int]:
    """The ids of schedulers, and of the schedulers that a ``ChainedScheduler`` among them steps."""
    found = set(map(id, schedulers))
    for scheduler in schedulers:
        found |= _ids_with_chained(schedulers_within(scheduler))
    return found


def step_schedulers(schedulers: Sequence[Any], step_freq: str | None) -> None:
    """Step all schedulers, as `step_freq` says.

    Raises:
        ConfigurationError: a `step` needs an argument.
    """
    for scheduler in schedulers:
        try:
            scheduler.step()
        except TypeError as error:
            # A `train_epoch` of the user's own has called the default one.
            if needed := _needed_by_step(scheduler):
                raise _unknown_argument_error(scheduler, needed, step_freq) from error
            raise


def update_schedulers(schedulers: Sequence[Any], metric: float) -> None:
    """Step all schedulers, with `metric` where their `step` takes one.

    Raises:
        ConfigurationError: a `step` needs something else; none has stepped.
    """
    by_place = [_takes_metric_by_place(scheduler) for scheduler in schedulers]
    for scheduler, is_by_place in zip(schedulers, by_place, strict=True):
        if not is_by_place and not (needed := _needed_by_step(scheduler)) <= _METRICS:
            raise _unknown_argument_error(scheduler, needed, SCHEDULER_STEP_MANUAL)
    for scheduler, is_by_place in zip(schedulers, by_place, strict=True):
        if is_by_place:
            scheduler.step(metric)
        else:
            named = _METRICS & _parameters_of_step(scheduler).keys()
            scheduler.step(**dict.fromkeys(named, metric))


def _takes_metric_by_place(scheduler: Any) -> bool:
    """Whether the first argument of its `step` is a metric, by another name or without one.

    Of schedulers that are not torch's: ``step(self, val_loss)``, ``step(self, *args)`` or
    ``step(self, metric, /)``. What counts epochs or updates takes no metric.
    """
    if isinstance(scheduler, LRScheduler):
        return False
    parameters = list(_parameters_of_step(scheduler).values())
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return False
    first, needed = parameters[0], _needed_by_step(scheduler)
    if first.kind is inspect.Parameter.VAR_POSITIONAL:
        return not needed and not _METRICS & {each.name for each in parameters}
    is_nameless = first.kind is inspect.Parameter.POSITIONAL_ONLY
    if first.name in _METRICS:
        return is_nameless and needed <= {first.name}
    return needed == {first.name} and first.name not in _COUNTERS


def _parameters_of_step(scheduler: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(scheduler.step).parameters
    except ValueError:  # written in C
        return {}


def _needed_by_step(scheduler: Any) -> set[str]:
    """The parameters without a default of a scheduler's `step`."""
    parameters = _parameters_of_step(scheduler).values()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in parameters if p.default is p.empty and p.kind not in open_ended}


def _unknown_argument_error(
    scheduler: Any, needed: set[str], step_freq: str | None
) -> ConfigurationError:
    kind = type(scheduler).__name__
    return ConfigurationError(
        f"{kind} needs {', '.join(f'`{name}`' for name in sorted(needed))} to step",
        expected="a `step` without arguments, or one that takes `metric` or `metrics`",
        got=f"{kind}.step{inspect.signature(scheduler.step)}, scheduler_step_freq={step_freq!r}",
        fix='scheduler_step_freq="manual", and a call of it in a train_epoch of your own, with'
        ' info["epoch_idx"] for the epoch; or a subclass whose step() counts itself',
    )
