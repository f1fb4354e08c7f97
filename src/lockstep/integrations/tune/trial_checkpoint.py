# SPDX-License-Identifier: Apache-2.0
"""A trial's checkpoint: a directory with the trainer's state and its optimizers' hyperparameters.

Population based training loads the state of a better trial into a trial whose config it has just
changed. An optimizer's state holds its learning rate, so that a plain load would undo the change.
So the checkpoint also holds the hyperparameters with which the optimizers were made. A trial that
was made with other hyperparameters keeps its own; its learning rate is multiplied by the factor by
which a scheduler had changed the better trial's.

A parameter group that was added since `setup` (a layer that was unfrozen) is in no config. It keeps
what was loaded, and its learning rate moves with its optimizer's: by the factor between the two
trials' rates of the first group.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch

from lockstep._torch_compat import schedulers_within, set_last_lr
from lockstep.operator.registration import registered_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.operator import TrainingOperator
    from lockstep.trainer import TorchTrainer

_STATE: Final = "trainer.checkpoint"
_HYPERPARAMETERS: Final = "hyperparameters.json"

Hyperparameters = list[list[dict[str, Any]]]
"""The hyperparameters of each parameter group of each optimizer."""

_initial_hyperparameters: WeakKeyDictionary[TorchTrainer, str] = WeakKeyDictionary()
"""The hyperparameters with which each trainer's optimizers were made, as JSON."""


def note_hyperparameters(trainer: TorchTrainer) -> None:
    """Remember the optimizers' hyperparameters; only the first call does so, before training."""
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
    return [
        [
            {name: _to_plain(value) for name, value in group.items() if _is_plain(value)}
            for group in optimizer.param_groups
        ]
        for optimizer in registered_parts(operator).optimizers
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(each, int | float) for each in value)
    is_number = isinstance(value, torch.Tensor) and value.dim() == 0
    return is_number or value is None or isinstance(value, bool | int | float | str)


def _to_plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _apply_own_hyperparameters(
    ours: Hyperparameters, theirs: Hyperparameters, operator: TrainingOperator
) -> None:
    run = registered_parts(operator)
    for optimizer, mine, others in zip(run.optimizers, ours, theirs, strict=True):
        groups = optimizer.param_groups
        noted = list(zip(groups, mine, others, strict=False))
        for group, own, other in noted:
            _apply_to_group(group, own, other)
        for added in groups[len(noted) :]:
            _scale_rates(added, _factor_between(mine[0], others[0]))
    for scheduler in run.schedulers:
        _update_base_rates(scheduler)


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


def _apply_to_group(
    group: dict[str, Any], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    changed = {name: value for name, value in ours.items() if theirs.get(name) != value}
    base = "initial_lr" if "initial_lr" in ours else "lr"
    if base in changed or "lr" in changed:
        was = theirs.get(base)
        scale = _to_plain(group["lr"]) / was if was else 1.0
        changed["lr"] = ours[base] * scale
    for name, value in changed.items():
        before = group.get(name)
        if isinstance(before, torch.Tensor):
            before.fill_(value)
        else:
            group[name] = tuple(value) if isinstance(before, tuple) else value


def _update_base_rates(scheduler: Any) -> None:
    """Set the base learning rates of `scheduler` and its inner schedulers to the new ones."""
    for inner in schedulers_within(scheduler):
        _update_base_rates(inner)
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    if hasattr(scheduler, "base_lrs") and all("initial_lr" in group for group in groups):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        set_last_lr(scheduler, [group["lr"] for group in groups])
