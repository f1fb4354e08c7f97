# SPDX-License-Identifier: Apache-2.0
"""The comparison of optimizers and schedulers across ranks.

Equal gradients keep replicas equal only if every rank's optimizer does the same with them. A
learning rate that depends on the rank, or a momentum that rank 0 alone has loaded, lets the
replicas drift apart without any error; in shards each rank's rows would have another optimizer.
"""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lockstep.content_digest import content_digest
from lockstep.errors import ReplicasDifferError
from lockstep.sync import is_local
from lockstep.sync.optimizer_inspection import optimizer_parameters, optimizers_with_state
from lockstep.tensor_copies import is_shard
from lockstep.tensor_tree import tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.group import Group
    from lockstep.operator.training_parts import TrainingParts


def compare_optimizers(group: Group, registered: TrainingParts, states: Sequence[str] = ()) -> None:
    """Compare the optimizers and schedulers of all ranks; raise on every rank or on none.

    Parameters marked `lockstep.local` differ by design, and so may a group of only such ones.

    Args:
        states: see `describe_states`.

    Collective:
        Every rank. Two small all-gathers.

    Raises:
        ReplicasDifferError: names the first difference and the ranks.
    """
    everyone = group.exchange([*_description(registered), *states])
    expected = everyone[0]
    for rank, got in enumerate(everyone):
        if got == expected:
            continue
        lines = zip([*expected, "nothing more"], [*got, "nothing more"], strict=False)
        ours, theirs = next((a, b) for a, b in lines if a != b)
        raise ReplicasDifferError(
            "the ranks did not make the same optimizers or schedulers",
            where=f"rank {rank} against rank 0",
            expected=ours,
            got=theirs,
            cause="something in making them depends on the rank: the replicas would drift apart",
            fix="make the same, and load the same states, on every rank; or mark parameters that"
            " differ by design: lockstep.local(...)",
        )


def describe_states(registered: TrainingParts) -> list[str]:
    """One line for each parameter of which an optimizer has a state, with a hash of its values.

    Of a state in shards each rank has other values: there the line has the shapes alone.
    """
    names = registered.names_of_parameters()
    lines: list[str] = []
    for number, optimizer in enumerate(optimizers_with_state(registered.optimizers)):
        lines += [
            f"optimizer {number}: state of `{names.get(id(param), '?')}`:"
            f" {_names_in(state)} ({content_digest(tree_map(_shape_of_shard, state))})"
            for param in optimizer_parameters(optimizer)
            if not is_local(param) and (state := optimizer.state.get(param))
        ]
    return lines


def _names_in(state: Any) -> str:
    return ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__


def _shape_of_shard(leaf: Any) -> Any:
    return tuple(leaf.shape) if is_shard(leaf) else leaf


def _description(registered: TrainingParts) -> list[str]:
    """One line for each parameter group and scheduler: the settings that its steps depend on."""
    names = registered.names_of_parameters()
    lines: list[str] = []
    for number, optimizer in enumerate(registered.optimizers):
        lines.append(f"optimizer {number}: {type(optimizer).__name__}")
        for group in optimizer.param_groups:
            shared = [p for p in group["params"] if not is_local(p)]
            if shared:
                held = ", ".join(names.get(id(p), "?") for p in shared)
                lines.append(f"optimizer {number}: {_comparable_settings(group)} for {held}")
    for number, scheduler in enumerate((*registered.schedulers, *registered.stepped_by_loop)):
        known = isinstance(scheduler, LRScheduler)
        lines.append(
            f"scheduler {number}: {type(scheduler).__name__}"
            f" {_comparable_settings(scheduler.state_dict()) if known else ''}"
        )
    return lines


def _comparable_settings(settings: dict[str, Any]) -> str:
    shown = {name: _comparable_value(value) for name, value in settings.items() if name != "params"}
    return str({name: value for name, value in shown.items() if value is not None})


def _comparable_value(value: Any) -> str | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return str([_comparable_value(item) for item in value])
    return repr(value) if isinstance(value, numbers.Number | str) else None
