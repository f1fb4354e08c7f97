# SPDX-License-Identifier: Apache-2.0
"""A worker's state as plain tensors and Python, and back.

Taking a state over is all or nothing: everything that can be compared is compared before
anything is changed, and what fails later is undone from a copy.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep._torch_compat import buffers_of, layout_versions, set_layout_versions
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.operator.model_copies import copied_models
from lockstep.operator.state_copy import load_state
from lockstep.sync import is_block, is_expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.operator import TrainingOperator
    from lockstep.operator.training_parts import TrainingParts


def collect(
    operator: TrainingOperator, run: TrainingParts, take: Callable[[Any], Any]
) -> dict[str, Any]:
    """Everything that the operator registered, on the CPU.

    Args:
        take: `copied`, or `moved` for who is done with it before training goes on.
    """
    state: dict[str, Any] = {
        "models": [take(model.state_dict()) for model in run.plain_models()],
        "optimizers": [take(optimizer.state_dict()) for optimizer in run.optimizers],
        "schedulers": [take(scheduler.state_dict()) for scheduler in run.schedulers],
        "criterion": take(run.plain_criterion().state_dict())
        if isinstance(run.criterion, nn.Module)
        else None,
        "precision": take(operator._lockstep.precision.state_dict()),
        "operator": _state_of_its_own(operator, take),
        "global_step": operator._lockstep.committed,
    }
    if run.averages:
        state["ema"] = [take(average.state_dict()) for average in run.averages]
    return state


def _state_of_its_own(operator: TrainingOperator, take: Callable[[Any], Any]) -> Any:
    """What the user's `state_dict` returns."""
    try:
        return take(operator.state_dict())
    except TypeError as error:
        raise ConfigurationError(
            f"{type(operator).__name__}.state_dict returned something that cannot be copied",
            cause=f"{type(error).__name__}: {error}",
            fix="return what can be pickled: numbers, strings, tensors, and dicts or lists of them",
        ) from error


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which this may be a shard; then every rank has to call it."""
    if type(tensor).__name__ != "DTensor":
        return tensor
    from lockstep.sync.parameter_shards import whole_of

    return whole_of(tensor)


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def copied(value: Any, clone: Callable[[torch.Tensor], torch.Tensor] = _cloned) -> Any:
    """The same structure with tensors cloned to the CPU; later training must not move them.

    Args:
        clone: copies one tensor to the CPU, into memory of its choice.
    """
    return _rebuilt(value, clone, copy.deepcopy)


def moved(value: Any) -> Any:
    """The same structure on the CPU; what is there already is not copied."""
    return _rebuilt(value, lambda tensor: tensor.to("cpu"), lambda leaf: leaf)


def _rebuilt(
    value: Any, move: Callable[[torch.Tensor], torch.Tensor], keep: Callable[[Any], Any]
) -> Any:
    if isinstance(value, torch.Tensor):
        return move(whole(value.detach()))
    if isinstance(value, Mapping):
        copies = OrderedDict((key, _rebuilt(item, move, keep)) for key, item in value.items())
        # A module's `state_dict()` carries the versions of its layouts.
        metadata = layout_versions(value)
        if metadata is None:
            return dict(copies)
        set_layout_versions(copies, copy.deepcopy(metadata))
        return copies
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, move, keep) for item in value)
    return keep(value)


def _kind_problems(run: TrainingParts, state: Mapping[str, Any]) -> list[str]:
    """What is there in another number, or is nothing that `state_dict` returns."""
    found: list[str] = []
    for what, mine in (
        ("models", run.models),
        ("optimizers", run.optimizers),
        ("schedulers", run.schedulers),
        ("averages (ema)", run.averages),
    ):
        is_average = mine is run.averages
        theirs = state.get("ema" if is_average else what) or []
        if not isinstance(theirs, list | tuple) or any(
            not isinstance(each, Mapping) for each in theirs
        ):
            found.append(f"its {what} are no list of state_dicts")
        # A state without averages fits, for they begin at its weights.
        elif len(theirs) != len(mine) and (theirs or not is_average):
            found.append(f"it holds {len(theirs)} {what}, the operator registered {len(mine)}")
    for what in ("criterion", "precision"):
        if not isinstance(state.get(what) or {}, Mapping):
            found.append(f"its {what} is no state_dict")
    if not isinstance(state.get("global_step", 0), int):
        found.append("its global_step is no number")
    return found


def _problems(run: TrainingParts, state: Mapping[str, Any]) -> list[str]:
    """Why `state` does not fit this operator: one sentence each, none if it fits."""
    found = _kind_problems(run, state)
    if found:
        return found
    for index, (model, saved) in enumerate(zip(run.plain_models(), state["models"], strict=True)):
        found += _module_problems(f"model {index}", model, saved)
    saved_criterion = state.get("criterion")
    if isinstance(run.criterion, nn.Module) and saved_criterion is not None:
        found += _module_problems("criterion", run.plain_criterion(), saved_criterion)
    for index, pair in enumerate(zip(run.averages, state.get("ema") or [], strict=False)):
        found += _module_problems(f"average (ema) {index}", *pair)
    for index, (optimizer, saved) in enumerate(
        zip(run.optimizers, state["optimizers"], strict=True)
    ):
        mine_sizes = [len(group["params"]) for group in optimizer.param_groups]
        saved_sizes = [len(group["params"]) for group in saved.get("param_groups", [])]
        if mine_sizes != saved_sizes:
            found.append(
                f"optimizer {index} holds parameter groups of sizes {saved_sizes} there,"
                f" {mine_sizes} here"
            )
    return found


def _module_problems(name: str, module: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    mine = module.state_dict()
    found = [f"{name} lacks {key!r}" for key in mine if key not in saved]
    found += [f"{name} has {key!r}, unknown here" for key in saved if key not in mine]
    for key in mine.keys() & saved.keys():
        here, there = getattr(mine[key], "shape", None), getattr(saved[key], "shape", None)
        if here != there:
            found.append(f"{name}: {key!r} has shape {_shape(there)} there, {_shape(here)} here")
    return found


def _shape(shape: Any) -> str:
    return str(tuple(shape)) if shape is not None else "none"


def check(run: TrainingParts, state: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` that lists what does not fit; change nothing."""
    if "models" not in state and any(isinstance(each, torch.Tensor) for each in state.values()):
        raise CheckpointError(
            "the state is a model's own state_dict",
            expected="what trainer.state_dict() returned, or trainer.save(path) wrote",
            got=f"a dict with keys {', '.join(list(map(str, state))[:3])}, ...",
            fix="load it in setup, before register: model.load_state_dict(torch.load(path))",
        )
    found = _problems(run, state)
    if found:
        shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        raise CheckpointError(
            "the state is of another model",
            got=shown,
            fix="build the trainer with the operator and config that the state was saved with",
        )


def apply(operator: TrainingOperator, run: TrainingParts, state: Mapping[str, Any]) -> None:
    """Load `state` into models, optimizers, schedulers, criterion and operator."""
    for model, saved in zip(run.plain_models(), state["models"], strict=True):
        _load(model, saved)
    if isinstance(run.criterion, nn.Module) and state.get("criterion") is not None:
        _load(run.plain_criterion(), state["criterion"])
    _load_averages(run, state.get("ema"))
    for optimizer, saved in zip(run.optimizers, state.get("optimizers") or [], strict=True):
        # Optimizers keep what they are given; another rank's copy must not be shared.
        load_state(optimizer, copied(saved))
    for scheduler, saved in zip(run.schedulers, state.get("schedulers") or [], strict=True):
        scheduler.load_state_dict(copy.deepcopy(saved))
    operator._lockstep.precision.load_state_dict(state.get("precision") or {})
    operator._lockstep.committed = operator.global_step = int(state.get("global_step", 0))
    if state.get("operator") is not None:
        operator.load_state_dict(copy.deepcopy(state["operator"]))


def _load_averages(run: TrainingParts, saved: Sequence[Mapping[str, Any]] | None) -> None:
    for number, (model, average) in enumerate(zip(run.plain_models(), run.averages, strict=False)):
        if saved:
            _load(average, saved[number])
        else:
            # An average that has averaged nothing takes the weights as they are.
            average.n_averaged.zero_()
            average.update_parameters(model)
            average.n_averaged.zero_()


def _load(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """``load_state_dict``, also of buffers into which torch refuses to write."""
    places: dict[int, torch.Tensor] = {}
    for path, part in module.named_modules():
        for key, buffer in buffers_of(part).items():
            value = saved.get(f"{path}.{key}".lstrip("."))
            if buffer is None or not isinstance(value, torch.Tensor):
                continue
            if not _takes(buffer, value):
                # Those that share one go on sharing it.
                fresh = value.to(buffer.device, buffer.dtype, copy=True)
                buffers_of(part)[key] = places.setdefault(id(buffer), fresh)
    module.load_state_dict(saved)


def _takes(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether it can be written over, or is nothing that torch would write over."""
    if buffer.is_nested or value.is_nested or buffer.shape != value.shape:
        return True
    if is_block(buffer) and is_block(value):
        return not is_expanded(buffer)
    # A compressed one has room for as many numbers as it holds.
    return buffer.layout == value.layout and buffer.layout in (torch.strided, torch.sparse_coo)


def averages(run: TrainingParts) -> list[nn.Module]:
    """The models with the averages of their weights."""
    if run.averages:
        return [average.module for average in run.averages]
    raise ConfigurationError(
        "there is no average of the weights",
        got="register() without ema",
        fix="self.register(..., ema=0.999) in setup",
    )


def model_copies(run: TrainingParts, models: list[nn.Module]) -> nn.Module | list[nn.Module]:
    """Copies of `models` on the CPU, without gradients, hooks or any trace of lockstep.

    Parameters and buffers are moved before the modules are copied, so that a device that is
    nearly full need not hold a second model.
    """
    copies = copied_models(models, torch.device("cpu"))
    return copies[0] if run.models_given_alone else copies
