# SPDX-License-Identifier: Apache-2.0
"""What each rank has of its own in a run's state: tensors that `lockstep.local` marks.

A state holds rank 0's among the others, so that it is complete, and every rank's beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.sync import is_local
from lockstep.sync.optimizer_inspection import optimizer_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch
    from torch import nn

    from lockstep.operator.training_parts import TrainingParts

_STATE = "state"
"""The key of the parameters' states in an optimizer's ``state_dict``."""


def local_state(run: TrainingParts) -> dict[str, Any]:
    """This rank's local tensors, and what optimizers keep for them; no copies.

    Returns:
        Under the keys of a state for each module its tensors by name, and for each optimizer the
        states of its parameters by number.
    """
    modules = [_tensors_in(module) for module in run.plain_modules()]
    has_criterion = len(modules) > len(run.models)
    return {
        "models": modules[: len(run.models)],
        "criterion": modules[-1] if has_criterion else None,
        "ema": [*_averages_of(run, modules)],
        "optimizers": [*_states_in(run.optimizers)],
        "inner_optimizers": [*_states_in(run.inner_optimizers())],
    }


def with_local_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """`state` with the tensors of its "local" in the place of rank 0's."""
    own = state.get("local")
    if own is None:
        return state
    merged = {**state}
    for key in ("models", "criterion", "ema"):
        merged[key] = _merge(state.get(key), own[key], _with_tensors)
    for key in ("optimizers", "inner_optimizers"):
        merged[key] = _merge(state.get(key), own[key], _with_states)
    return merged


def _tensors_in(module: nn.Module) -> dict[str, torch.Tensor]:
    saved = module.state_dict().keys()
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: each.detach() for name, each in tensors if name in saved and is_local(each)}


def _averages_of(run: TrainingParts, modules: list[dict[str, torch.Tensor]]) -> Iterator[Any]:
    for average, own in zip(run.averages, modules, strict=False):
        saved = average.state_dict()
        yield {name: saved[name] for name in map("module.{}".format, own)}


def _states_in(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[dict[int, Any]]:
    for optimizer in optimizers:
        yield {
            number: optimizer.state[parameter]
            for number, parameter in enumerate(optimizer_parameters(optimizer))
            if is_local(parameter) and parameter in optimizer.state
        }


def _merge(saved: Any, own: Any, merge_one: Callable[[Any, Any], Any]) -> Any:
    if not saved:
        return saved
    if isinstance(saved, list):
        return [merge_one(*pair) for pair in zip(saved, own, strict=True)]
    return merge_one(saved, own)


def _with_tensors(saved: Mapping[str, Any], own: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {**saved, **own} if own else saved


def _with_states(saved: Mapping[str, Any], own: Mapping[int, Any]) -> Mapping[str, Any]:
    # An optimizer of another package may keep its state in another form.
    if not own or _STATE not in saved:
        return saved
    return {**saved, _STATE: {**saved[_STATE], **own}}
