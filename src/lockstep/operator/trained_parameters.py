# SPDX-License-Identifier: Apache-2.0
"""What a run has changed, since `setup`, of which parameters it trains.

A loop may unfreeze layers, and give their parameters to an optimizer (``add_param_group``). A state
holds these changes: a process that begins with `setup`, as a joining worker and a resumed run do,
makes them before it loads the optimizers' states, which are numbered through the groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from lockstep.operator.training_parts import TrainedParameters, TrainingParts

KEY: Final = "trained_parameters"
"""The key of the changes in a state. States of earlier versions lack it."""


def _after_setup(run: TrainingParts) -> TrainedParameters:
    assert run.trained_after_setup is not None, "setup has ended"
    return run.trained_after_setup


def changes_since_setup(run: TrainingParts) -> dict[str, Any]:
    """What a state holds under `KEY`: the flags that changed, and the names in added groups."""
    now, before = run.trained_parameters(), _after_setup(run)
    return {
        "requires_grad": {
            name: flag
            for name, flag in now.requires_grad.items()
            if flag != before.requires_grad.get(name)
        },
        "added_groups": [
            list(groups[len(first) :])
            for groups, first in zip(now.groups, before.groups, strict=True)
        ],
    }


def names_since_setup(run: TrainingParts) -> list[str]:
    """The names of parameters that no parameter had when `setup` had ended, as after pruning."""
    return sorted(run.trained_parameters().requires_grad.keys() - _after_setup(run).requires_grad)


def _added_groups(run: TrainingParts, state: Mapping[str, Any], number: int) -> list[Sequence[str]]:
    """The names in the groups of an optimizer of `state` beyond those that `setup` makes here.

    This program's `setup` may already make groups that the saved run added later; those are not
    added twice.
    """
    names, made = list(state[KEY]["added_groups"][number]), _after_setup(run).groups[number]
    saved = state["optimizers"][number].get("param_groups")
    if saved is None:  # the optimizer has a form of its own for its state
        return [each for each in names if each not in made]
    missing = max(len(saved) - len(made), 0)
    return names[max(len(names) - missing, 0) :] if missing else []


def group_sizes(run: TrainingParts, state: Mapping[str, Any]) -> dict[int, list[int]]:
    """The sizes of the groups that optimizers have once `restore_trained_parameters` returns.

    Args:
        run: after its `setup`.
        state: of as many optimizers.

    Returns:
        By the identity of the list of groups, which an optimizer and one within it may share.
    """
    sizes = {}
    for number, optimizer in enumerate(run.optimizers):
        groups = [group["params"] for group in optimizer.param_groups]
        if KEY in state:
            # Of those that `setup` has made, a loop may have changed the lists.
            made = groups[: len(_after_setup(run).groups[number])]
            groups = [*made, *_added_groups(run, state, number)]
        sizes[id(optimizer.param_groups)] = list(map(len, groups))
    return sizes


def unknown_names(run: TrainingParts, state: Mapping[str, Any]) -> list[str]:
    """The names in added groups of `state` that no parameter of `run` has."""
    if KEY not in state:
        return []
    known = run.named_parameters()
    added = (_added_groups(run, state, number) for number in range(len(run.optimizers)))
    return [name for groups in added for names in groups for name in names if name not in known]


def restore_trained_parameters(run: TrainingParts, state: Mapping[str, Any]) -> None:
    """Freeze, unfreeze, and add or remove parameter groups, as the run of `state` had done."""
    if KEY not in state:
        return
    before, named = _after_setup(run), run.named_parameters()
    flags = {**before.requires_grad, **state[KEY]["requires_grad"]}
    for name, parameter in named.items():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))
    now = run.trained_parameters()
    for number, optimizer in enumerate(run.optimizers):
        first, added = len(before.groups[number]), _added_groups(run, state, number)
        if list(now.groups[number][first:]) == added:
            continue
        del optimizer.param_groups[first:]
        saved = state["optimizers"][number].get("param_groups")
        # An optimizer with a form of its own for its state loads the settings by itself.
        settings = saved[first:] if saved is not None else [{} for _ in added]
        for names, each in zip(added, settings, strict=True):
            _add_group(optimizer, {name: named[name] for name in names}, each)


def _add_group(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, nn.Parameter],
    settings: Mapping[str, Any],
) -> None:
    given: list[Any] = list(params.values())
    # An optimizer of `named_parameters()` has no other groups.
    if any("param_names" in group for group in optimizer.param_groups):
        given = list(zip(settings.get("param_names", params), given, strict=True))
    kept = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
    optimizer.add_param_group({**kept, "params": given})
