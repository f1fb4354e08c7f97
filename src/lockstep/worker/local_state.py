# SPDX-License-Identifier: Apache-2.0
"""What each rank has of its own in a run's state: tensors that `lockstep.local` marks.

In a state the model's tensors include rank 0's local ones, as in a state of one process;
`local_by_rank` holds those of every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.sync import is_local, named_local_tensors
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
        states of its parameters by number; None for a buffer that no forward has filled, and for a
        parameter without a state.
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


def with_local_state(run: TrainingParts, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """`state` with the tensors of its "local" in the place of rank 0's, where `run` has them local.

    The program that wrote the state may have marked others: what is synchronised now has to be
    equal on all ranks.
    """
    saved = state.get("local")
    if saved is None:
        return state
    merged, here = {**state}, local_state(run)
    for key in ("models", "criterion", "ema"):
        merged[key] = _merge(state.get(key), saved[key], here[key], _with_tensors)
    for key in ("optimizers", "inner_optimizers"):
        merged[key] = _merge(state.get(key), saved[key], here[key], _with_states)
    return merged


def _tensors_in(module: nn.Module) -> dict[str, torch.Tensor | None]:
    # An unfilled buffer has its place here: in a file of a later step it is filled.
    saved = module.state_dict().keys()
    return {
        name: None if held is None else held.detach()
        for name, held in named_local_tensors(module)
        if held is None or name in saved
    }


def _averages_of(
    run: TrainingParts, modules: list[dict[str, torch.Tensor | None]]
) -> Iterator[Any]:
    for average, own in zip(run.averages, modules, strict=False):
        saved = average.state_dict()
        yield {name: saved.get(name) for name in map("module.{}".format, own)}


def _states_in(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[dict[int, Any]]:
    for optimizer in optimizers:
        yield {
            number: optimizer.state.get(parameter)
            for number, parameter in enumerate(optimizer_parameters(optimizer))
            if is_local(parameter)
        }


def _merge(whole: Any, saved: Any, here: Any, merge_one: Callable[..., Any]) -> Any:
    """
    Args:
        whole: one ``state_dict``, or a list of them.
        saved: in the same shape, what the state's rank had of its own.
        here: in the same shape, what this rank has of its own.
        merge_one: puts what `saved` and `here` have both into a copy of `whole`; is given `here`
            as well.
    """
    if not whole:
        return whole
    if isinstance(whole, list):
        return [_merge(*three, merge_one) for three in zip(whole, saved, here, strict=True)]
    own = {key: value for key, value in (saved or {}).items() if key in (here or {})}
    return merge_one(whole, own, here) if own else whole


def _with_tensors(
    whole: Mapping[str, Any], own: Mapping[str, Any], here: Mapping[str, Any]
) -> Mapping[str, Any]:
    # A buffer that this rank had not filled stays empty: rank 0's value is not its own.
    empty = {name for name, value in own.items() if value is None and here[name] is None}
    filled = {name: value for name, value in own.items() if value is not None}
    return {**{name: value for name, value in whole.items() if name not in empty}, **filled}


def _with_states(
    whole: Mapping[str, Any], own: Mapping[int, Any], here: Mapping[int, Any]
) -> Mapping[str, Any]:
    # An optimizer of another package may keep its state in another form.
    if _STATE not in whole:
        return whole
    states = {number: held for number, held in whole[_STATE].items() if number not in own}
    states |= {number: held for number, held in own.items() if held is not None}
    return {**whole, _STATE: states}
