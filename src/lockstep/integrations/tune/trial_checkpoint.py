# SPDX-License-Identifier: Apache-2.0
"""A trial's checkpoint: a directory with the trainer's state and the trial's hyperparameters.

Population based training loads the state of a better trial into a trial whose config it has just
changed. An optimizer's state holds its learning rate, and a scheduler's its ``gamma``, so that a
plain load would undo the change. So the checkpoint also holds the hyperparameters with which the
optimizers and schedulers were made. A trial that was made with other hyperparameters keeps its own;
its learning rate is multiplied by the factor by which a scheduler had changed the better trial's.
What counts steps is the same in all trials when they are made, and so stays as it was loaded.

A parameter group that was added since `setup` (a layer that was unfrozen) is in no config. It keeps
what was loaded, and its learning rate moves with its optimizer's: by the factor between the two
trials' rates of the first group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch

from lockstep._torch_compat import schedulers_within, set_last_lr
from lockstep.operator.registration import registered_parts

if TYPE_CHECKING:
    from lockstep.operator import TrainingOperator
    from lockstep.operator.training_parts import TrainingParts
    from lockstep.trainer import TorchTrainer

_STATE: Final = "trainer.checkpoint"
_HYPERPARAMETERS: Final = "hyperparameters.json"

_LAST_RATES: Final = "_last_lr"
"""What a scheduler's state holds of the rates in effect, which it takes from its optimizer."""

Hyperparameters = list[list[dict[str, Any]]]
"""Of each optimizer those of its parameter groups; behind them of each scheduler those of its
state."""

_initial_hyperparameters: WeakKeyDictionary[TorchTrainer, str] = WeakKeyDictionary()
"""The hyperparameters with which each trainer's optimizers and schedulers were made, as JSON."""


def note_hyperparameters(trainer: TorchTrainer) -> None:
    """Remember the trial's hyperparameters; only the first call does so, before training."""
    if trainer not in _initial_hyperparameters:
        _initial_hyperparameters[trainer] = json.dumps(
            trainer.apply_all_operators(_read_hyperparameters)[0]
        )


def write(trainer: TorchTrainer, folder: str) -> None:
    """Save the trainer's state and hyperparameters into an existing, empty folder."""
    note_hyperparameters(trainer)
    trainer.save(Path(folder, _STATE))
    Path(folder, _HYPERPARAMETERS).write_text(_initial_hyperparameters[trainer])


def read(trainer: TorchTrainer, folder: str) -> None:
    """Load the state that `write` saved, maybe for another trial."""
    note_hyperparameters(trainer)
    trainer.load(Path(folder, _STATE))
    theirs = json.loads(Path(folder, _HYPERPARAMETERS).read_text())
    ours = json.loads(_initial_hyperparameters[trainer])
    if ours != theirs:
        trainer.apply_all_operators(partial(_apply_own_hyperparameters, ours, theirs))


def _read_hyperparameters(operator: TrainingOperator) -> Hyperparameters:
    run = registered_parts(operator)
    return [
        *([_to_plain(group) for group in optimizer.param_groups] for optimizer in run.optimizers),
        *([_to_plain(_state_of(scheduler))] for scheduler in _schedulers_of(run)),
    ]


def _schedulers_of(run: TrainingParts) -> list[Any]:
    """The schedulers (and GradScalers) whose states a checkpoint holds."""
    return [*run.schedulers, *run.stepped_by_loop]


def _state_of(scheduler: Any) -> Any:
    # Without checkpoints a trial may train with a scheduler that has no state.
    return scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        # Tensors in a list may be the group's parameters.
        return all(_is_plain(each) and not isinstance(each, torch.Tensor) for each in value)
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    is_number = isinstance(value, Real) and value == value  # NaN equals no other trial's
    return is_number or value is None or isinstance(value, str | Mapping)


def _to_plain(value: Any) -> Any:
    """`value` as JSON: of a mapping by names what is plain, and one by numbers as pairs."""
    if isinstance(value, Mapping):
        plain = {
            key: _to_plain(each)
            for key, each in value.items()
            if key != _LAST_RATES and _is_plain(each)
        }
        has_names = all(isinstance(key, str) for key in plain)
        return plain if has_names else sorted(map(list, plain.items()), key=repr)
    if isinstance(value, tuple | list):
        return [_to_plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value  # of torch or numpy


def _apply_own_hyperparameters(
    ours: Hyperparameters, theirs: Hyperparameters, operator: TrainingOperator
) -> None:
    run = registered_parts(operator)
    schedulers = _schedulers_of(run)
    # Shorter than the parts in a checkpoint of an earlier version, which lacks the schedulers'.
    noted = list(zip(ours, theirs, strict=False))
    for optimizer, both in zip(run.optimizers, noted, strict=False):
        _apply_to_groups(optimizer.param_groups, *both)
    for scheduler, (mine, others) in zip(schedulers, noted[len(run.optimizers) :], strict=False):
        if mine != others:
            scheduler.load_state_dict(_with_own(scheduler.state_dict(), mine[0], others[0]))
    for scheduler in schedulers:
        _update_base_rates(scheduler)


def _apply_to_groups(
    groups: list[dict[str, Any]], ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> None:
    for group, mine, others in zip(groups, ours, theirs, strict=False):
        rate = _own_rate(group, mine, others)
        group.update(_with_own(group, mine, others))
        if rate is not None:
            group["lr"] = _in_place_of(group["lr"], rate)
    for added in groups[len(ours) :]:
        _scale_rates(added, _factor_between(ours[0], theirs[0]))


def _base_rate(noted: Mapping[str, Any]) -> Any:
    """The learning rate before a scheduler: in `initial_lr` where there is a scheduler."""
    return noted.get("initial_lr", noted.get("lr"))


def _factor_between(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Our learning rate over theirs; 1 where they have none, or a rate of zero."""
    mine, other = _base_rate(ours), _base_rate(theirs)
    return mine / other if mine is not None and other else 1.0


def _scale_rates(group: dict[str, Any], factor: float) -> None:
    for name in ("lr", "initial_lr"):
        rate = group.get(name)
        if isinstance(rate, torch.Tensor):
            rate.mul_(factor)
        elif rate is not None:
            group[name] = rate * factor


def _own_rate(
    group: Mapping[str, Any], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> float | None:
    """Our learning rate in a loaded `group`, if it is another one than theirs."""
    base = "initial_lr" if "initial_lr" in ours else "lr"
    if all(ours.get(name) == theirs.get(name) for name in (base, "lr")):
        return None
    was = theirs.get(base)
    return float(ours[base] * (_to_plain(group["lr"]) / was if was else 1.0))


def _with_own(loaded: Any, ours: Any, theirs: Any) -> Any:
    """`loaded`, with what differs between `ours` and `theirs` as it is in `ours`."""
    if ours == theirs:
        return loaded
    if isinstance(ours, dict) and isinstance(loaded, Mapping):
        other = theirs if isinstance(theirs, dict) else {}
        own = {
            name: _with_own(loaded.get(name), value, other.get(name))
            for name, value in ours.items()
            if value != other.get(name)
        }
        return {**loaded, **own}
    lists = (loaded, ours, theirs)
    if all(isinstance(each, list) for each in lists) and len(set(map(len, lists))) == 1:
        return [_with_own(*each) for each in zip(*lists, strict=True)]
    return _in_place_of(loaded, ours)


def _in_place_of(loaded: Any, value: Any) -> Any:
    """`value`, which was plain, as an object of the class of `loaded`."""
    if isinstance(loaded, torch.Tensor):
        return loaded.fill_(value)
    if isinstance(value, list) and isinstance(loaded, tuple):
        return tuple(value)
    if isinstance(value, list) and isinstance(loaded, dict):
        return type(loaded)(dict(value))  # a mapping by numbers: the milestones of a MultiStepLR
    return value


def _update_base_rates(scheduler: Any) -> None:
    """Set the base learning rates of `scheduler` and its inner schedulers to the new ones."""
    for inner in schedulers_within(scheduler):
        _update_base_rates(inner)
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    if hasattr(scheduler, "base_lrs") and all("initial_lr" in group for group in groups):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        set_last_lr(scheduler, [group["lr"] for group in groups])
