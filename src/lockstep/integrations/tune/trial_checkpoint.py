# SPDX-License-Identifier: Apache-2.0
"""A trainer's state as the directory that Tune keeps, and the hyperparameters it was made with.

Population based training loads the state of a better trial into a trial whose config it has
just changed. An optimizer's state holds its learning rate, so that a plain load would undo the
change. Beside the state therefore stands what the optimizers were made with: where the trial
that loads was made with something else, its own holds, and what a scheduler had made of the
other's learning rate by then is applied to it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import schedulers_within, set_last_rates
from lockstep.operator.default_loss import registered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.operator import TrainingOperator
    from lockstep.trainer import TorchTrainer

_STATE: Final = "trainer.checkpoint"
_HYPERPARAMETERS: Final = "hyperparameters.json"

Hyperparameters = list[list[dict[str, Any]]]
"""By optimizer and parameter group."""


def hyperparameters(trainer: TorchTrainer) -> Hyperparameters:
    """What the optimizers' parameter groups hold besides parameters."""
    found: Hyperparameters = trainer.apply_all_operators(_read)[0]
    return found


def write(trainer: TorchTrainer, folder: str, made_with: Hyperparameters) -> None:
    """Save into an existing, empty folder."""
    trainer.save(Path(folder, _STATE))
    Path(folder, _HYPERPARAMETERS).write_text(json.dumps(made_with))


def read(trainer: TorchTrainer, folder: str, made_with: Hyperparameters) -> None:
    """Load what `write` saved, maybe of another trial.

    Args:
        made_with: what this trainer's optimizers were made with.
    """
    trainer.load(Path(folder, _STATE))
    theirs = json.loads(Path(folder, _HYPERPARAMETERS).read_text())
    # As JSON makes it: a tuple is a list.
    ours = json.loads(json.dumps(made_with))
    if ours != theirs:
        trainer.apply_all_operators(partial(_prefer, ours, theirs))


def _read(operator: TrainingOperator) -> Hyperparameters:
    return [
        [
            {name: _plain(value) for name, value in group.items() if _is_plain(value)}
            for group in optimizer.param_groups
        ]
        for optimizer in registered(operator).optimizers
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(isinstance(each, int | float) for each in value)
    is_number = isinstance(value, torch.Tensor) and value.dim() == 0
    return is_number or value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _prefer(ours: Hyperparameters, theirs: Hyperparameters, operator: TrainingOperator) -> None:
    run = registered(operator)
    for number, optimizer in enumerate(run.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            _prefer_in_group(group, ours[number][index], theirs[number][index])
    for scheduler in run.schedulers:
        _follow(scheduler)


def _prefer_in_group(
    group: dict[str, Any], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> None:
    changed = {name: value for name, value in ours.items() if theirs.get(name) != value}
    base = "initial_lr" if "initial_lr" in ours else "lr"
    if base in changed or "lr" in changed:
        was = theirs.get(base)
        scale = _plain(group["lr"]) / was if was else 1.0
        changed["lr"] = ours[base] * scale
    for name, value in changed.items():
        before = group.get(name)
        if isinstance(before, torch.Tensor):
            before.fill_(value)
        else:
            group[name] = tuple(value) if isinstance(before, tuple) else value


def _follow(scheduler: Any) -> None:
    """Schedulers that compute from the rates they began with begin with the new ones."""
    for inner in schedulers_within(scheduler):
        _follow(inner)
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    if hasattr(scheduler, "base_lrs") and all("initial_lr" in group for group in groups):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        set_last_rates(scheduler, [group["lr"] for group in groups])
