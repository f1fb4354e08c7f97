# SPDX-License-Identifier: Apache-2.0
"""Refuses a state that does not fit an operator, before anything has changed.

What a state is, and how it is loaded, is in `state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from lockstep._torch_compat import buffers_of
from lockstep._torch_compat.load_hooks import converts_state
from lockstep.error_texts import NEW_TRAINER, first_of
from lockstep.errors import CheckpointError, TrainerClosedError
from lockstep.operator.buffer_values import KEY as BUFFERS
from lockstep.operator.buffer_values import changed_buffers, changed_in, labelled_modules
from lockstep.operator.trained_parameters import group_sizes, unknown_names
from lockstep.worker.state_dict import OPTIMIZER_CLASSES, OPTIONAL, fix_of_names, parts_of

if TYPE_CHECKING:
    from lockstep.operator.training_parts import TrainingParts

_PLURALS: Final = {
    "ema": "averages (ema)",
    "inner_optimizers": "inner optimizers",
    "stepped_by_loop": "schedulers and GradScalers in self",
}


def refuse_unfit_state(run: TrainingParts, state: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` that lists the parts of `state` that do not fit; change nothing."""
    if "models" not in state and any(isinstance(each, torch.Tensor) for each in state.values()):
        raise CheckpointError(
            "the state is a model's own state_dict",
            expected="what trainer.state_dict() returned, or trainer.save(path) wrote",
            got=f"a dict with keys {', '.join(list(map(str, state))[:3])}, ...",
            fix="load it in setup, before register: model.load_state_dict(torch.load(path))",
        )
    found = _problems(run, state)
    if found:
        raise CheckpointError(
            "the state is of another model or optimizer",
            got=first_of(found, 5, "; "),
            fix=fix_of_names(" ".join(found)),
        )


def _problems(run: TrainingParts, state: Mapping[str, Any]) -> list[str]:
    """Why `state` does not fit this operator: one sentence each, none if it fits."""
    found = _kind_problems(run, state) or _class_problems(run, state)
    if found:
        return found
    sizes = group_sizes(run, state)
    for key, (noun, members) in parts_of(run).items():
        for index, (member, saved) in enumerate(zip(members, state.get(key) or [], strict=False)):
            name = f"{noun} {index}"
            if isinstance(member, nn.Module):
                changed = _changed(run, state, f"{key}.{index}")
                found += _module_problems(name, member, saved, changed)
            elif isinstance(member, torch.optim.Optimizer):
                found += _optimizer_problems(name, member, saved, sizes)
    found += [
        f"a parameter group holds {name!r}, unknown here" for name in unknown_names(run, state)
    ]
    saved_criterion = state.get("criterion")
    if isinstance(run.criterion, nn.Module) and saved_criterion is not None:
        changed = _changed(run, state, "criterion")
        found += _module_problems("criterion", run.plain_criterion(), saved_criterion, changed)
    return found


def _changed(run: TrainingParts, state: Mapping[str, Any], label: str) -> set[str]:
    """The names of the buffers that a forward has changed since `setup`, there or here."""
    module, first = labelled_modules(run)[label], run.buffers_after_setup[label]
    paths = {path for path, _ in module.named_modules()}
    there = {name for name in changed_in(state, label) if name.rpartition(".")[0] in paths}
    return there.union(changed_buffers(module, first))


def _kind_problems(run: TrainingParts, state: Mapping[str, Any]) -> list[str]:
    """Problems with the kinds and numbers of the parts of `state`."""
    found: list[str] = []
    for key, (_, members) in parts_of(run).items():
        saved, plural = state.get(key) or [], _PLURALS.get(key, key)
        is_list = isinstance(saved, list | tuple)
        if not is_list or not all(isinstance(each, Mapping) for each in saved):
            found.append(f"its {plural} are no list of state_dicts")
        elif len(saved) != len(members) and (saved or key not in OPTIONAL):
            found.append(f"it holds {len(saved)} {plural}, the operator registered {len(members)}")
    for key in ("criterion", "precision", BUFFERS):
        if not isinstance(state.get(key) or {}, Mapping):
            found.append(f"its {key} is no state_dict")
    if not isinstance(state.get("global_step", 0), int):
        found.append("its global_step is no number")
    return found


def _optimizer_problems(
    name: str,
    member: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    sizes: Mapping[int, list[int]],
) -> list[str]:
    loads_itself = type(member).load_state_dict is not torch.optim.Optimizer.load_state_dict
    if loads_itself and "param_groups" not in saved:
        return []
    here = sizes.get(id(member.param_groups))
    if here is None:
        here = [len(group["params"]) for group in member.param_groups]
    groups = saved.get("param_groups", [])
    there = [len(group["params"]) for group in groups]
    if here != there:
        return [f"{name} holds parameter groups of sizes {there} there, {here} here"]
    lacking = {option for group in groups for option in _options(member) - group.keys()}
    return [f"{name} lacks {option!r}, of {type(member).__name__}" for option in sorted(lacking)]


def _options(optimizer: torch.optim.Optimizer) -> set[str]:
    """The options that each group of an optimizer has to have, by which a class is told apart.

    Switches are none of them: torch adds some with its versions, and where a state of an earlier
    one lacks them, sets them as it loads it.
    """
    values = {**getattr(optimizer, "defaults", {})}
    options = {name for name, value in values.items() if not isinstance(value, bool | None)}
    return options.intersection(*optimizer.param_groups)


def _class_problems(run: TrainingParts, state: Mapping[str, Any]) -> list[str]:
    """Optimizers of another class, whose options may have the same names (Adam and AdamW)."""
    pairs = zip(run.optimizers, state.get(OPTIMIZER_CLASSES) or (), strict=False)
    return [
        f"optimizer {index} is {there} there, {type(optimizer).__name__} here"
        for index, (optimizer, there) in enumerate(pairs)
        if there != type(optimizer).__name__
    ]


def _module_problems(
    name: str, module: nn.Module, saved: Mapping[str, Any], changed: Set[str]
) -> list[str]:
    """Differences in names and shapes, except in what the module itself converts as it loads it.

    Args:
        changed: buffers that a forward has changed, there or here, and so need not be the same.
    """
    converting = tuple(
        f"{path}." if path else "" for path, part in module.named_modules() if converts_state(part)
    )
    mine = _without(converting, module.state_dict())
    saved = _without(converting, saved)
    found = [f"{name} lacks {key!r}" for key in mine if key not in saved and key not in changed]
    known = mine.keys() | _names_of_empty_buffers(module) | changed
    found += [f"{name} has {key!r}, unknown here" for key in saved if key not in known]
    for key in (mine.keys() & saved.keys()) - changed:
        here, there = getattr(mine[key], "shape", None), getattr(saved[key], "shape", None)
        if here != there:
            found.append(f"{name}: {key!r} has shape {_shape(there)} there, {_shape(here)} here")
    return found


def _without(prefixes: tuple[str, ...], state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.startswith(prefixes)}


def _names_of_empty_buffers(module: nn.Module) -> set[str]:
    """The names of buffers that are None until a forward fills them."""
    return {
        f"{path}.{key}".lstrip(".")
        for path, part in module.named_modules()
        for key, buffer in buffers_of(part).items()
        if buffer is None
    }


def _shape(shape: Any) -> str:
    return str(tuple(shape)) if shape is not None else "none"


def no_state_held_error() -> TrainerClosedError:
    """The error of a rank that cannot go back to the state from before a load that was refused."""
    return TrainerClosedError(
        "a state was refused when parts of it were loaded, and the one from before is lost",
        cause="the workers formed their group anew between the two calls, because one had died or"
        " joined; this rank has held no copy since",
        fix=NEW_TRAINER,
    )
