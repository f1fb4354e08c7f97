# SPDX-License-Identifier: Apache-2.0
"""A trial's checkpoint: a directory with the trainer's state and the trial's hyperparameters.

Population based training loads the state of a better trial into a trial whose config it has just
changed. An optimizer's state holds its learning rate, and a scheduler's its ``gamma``, so that a
plain load would undo the change. So the checkpoint also holds the hyperparameters with which the
optimizers and schedulers were made: what they were when `setup` had ended. A trial that was made
with other hyperparameters keeps its own; its learning rate is multiplied by the factor by which a
scheduler had changed the better trial's. What a scheduler counts goes on from the better trial's:
values that are the same in all trials when they are made (steps), and those that training has
changed since (GradScaler's ``scale``). The cycle of warm restarts follows from the steps.

A parameter group that was added since `setup` (a layer that was unfrozen) is in no config. It keeps
what was loaded, and its learning rate moves with its optimizer's: by the factor between the two
trials' rates of the first group.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from lockstep._torch_compat import schedulers_within, set_last_lr
from lockstep.operator.hyperparameters import steppers_of, to_plain
from lockstep.operator.registration import registered_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.operator import TrainingOperator
    from lockstep.operator.training_parts import Hyperparameters
    from lockstep.trainer import TorchTrainer

_STATE: Final = "trainer.checkpoint"
_HYPERPARAMETERS: Final = "hyperparameters.json"


def write(trainer: TorchTrainer, folder: str) -> None:
    """Save the trainer's state and hyperparameters into an existing, empty folder."""
    trainer.save(Path(folder, _STATE))
    Path(folder, _HYPERPARAMETERS).write_text(json.dumps(_hyperparameters_of(trainer)))


def read(trainer: TorchTrainer, folder: str) -> None:
    """Load the state that `write` saved, maybe for another trial."""
    trainer.load(Path(folder, _STATE))
    theirs = json.loads(Path(folder, _HYPERPARAMETERS).read_text())
    ours = _hyperparameters_of(trainer)
    if ours != theirs:
        trainer.apply_all_operators(partial(_apply_own_hyperparameters, ours, theirs))


def _hyperparameters_of(trainer: TorchTrainer) -> Hyperparameters:
    noted: Hyperparameters = trainer.apply_all_operators(_noted_hyperparameters)[0]
    return noted


def _noted_hyperparameters(operator: TrainingOperator) -> Hyperparameters:
    return registered_parts(operator).hyperparameters_after_setup


def _apply_own_hyperparameters(
    ours: Hyperparameters, theirs: Hyperparameters, operator: TrainingOperator
) -> None:
    run = registered_parts(operator)
    steppers = steppers_of(run)
    # Shorter than the parts in a checkpoint of an earlier version, which lacks the schedulers'.
    noted = list(zip(ours, theirs, strict=False))
    for optimizer, both in zip(run.optimizers, noted, strict=False):
        _apply_to_groups(optimizer.param_groups, *both)
    for stepper, (mine, others) in zip(steppers, noted[len(run.optimizers) :], strict=False):
        if mine != others:
            own = _with_own(stepper.state_dict(), mine[0], others[0], keeps_changed=True)
            stepper.load_state_dict(own)
            _find_cycle(stepper)
    for stepper in steppers:
        _update_base_rates(stepper)


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
    return float(ours[base] * (to_plain(group["lr"]) / was if was else 1.0))


def _with_own(loaded: Any, ours: Any, theirs: Any, *, keeps_changed: bool = False) -> Any:
    """`loaded`, with what differs between `ours` and `theirs` as it is in `ours`.

    Args:
        keeps_changed: keep what is not as in `theirs` any more: training has changed it since.
    """
    if ours == theirs:
        return loaded
    own_of = partial(_with_own, keeps_changed=keeps_changed)
    mine = _entries(ours)
    if isinstance(loaded, dict) and mine is not None:
        others = _entries(theirs) or {}
        own = copy.copy(loaded)  # of its class: a MultiStepLR reads its milestones as a Counter
        for name in others.keys() - mine.keys():
            own.pop(name, None)
        for name, value in mine.items():
            if value != others.get(name):
                own[name] = own_of(loaded.get(name), value, others.get(name))
        return own
    lists = (loaded, ours, theirs)
    if all(isinstance(each, list) for each in lists) and len(set(map(len, lists))) == 1:
        return [own_of(*each) for each in zip(*lists, strict=True)]
    if keeps_changed and to_plain(loaded) != theirs:
        return loaded
    return _in_place_of(loaded, ours)


def _entries(noted: Any) -> dict[Any, Any] | None:
    """The entries of a mapping as `to_plain` has it; None: it is something else."""
    is_pairs = isinstance(noted, list) and all(
        isinstance(each, list) and len(each) == 2 for each in noted
    )
    return dict(noted) if is_pairs or isinstance(noted, dict) else None


def _in_place_of(loaded: Any, value: Any) -> Any:
    """`value`, which was plain, as an object of the class of `loaded`."""
    if isinstance(loaded, torch.Tensor):
        return loaded.fill_(value)
    return tuple(value) if isinstance(value, list) and isinstance(loaded, tuple) else value


def _find_cycle(scheduler: Any) -> None:
    """Let warm restarts be in that cycle of their own lengths to which their steps lead."""
    for inner in schedulers_within(scheduler):
        _find_cycle(inner)
    if isinstance(scheduler, CosineAnnealingWarmRestarts):
        # A copy steps there, without an optimizer: the rates in effect change with the next step.
        twin = copy.copy(scheduler)
        vars(twin).update(optimizer=SimpleNamespace(param_groups=[]), base_lrs=[])
        twin.T_i = twin.T_0
        twin.step(max(twin.last_epoch, 0))
        scheduler.T_cur, scheduler.T_i = twin.T_cur, twin.T_i


def _update_base_rates(scheduler: Any) -> None:
    """Set the base learning rates of `scheduler` and its inner schedulers to the new ones."""
    for inner in schedulers_within(scheduler):
        _update_base_rates(inner)
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    if hasattr(scheduler, "base_lrs") and all("initial_lr" in group for group in groups):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        set_last_lr(scheduler, [group["lr"] for group in groups])
