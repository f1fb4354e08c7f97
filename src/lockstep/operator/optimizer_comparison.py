# SPDX-License-Identifier: Apache-2.0
"""The comparison of optimizers and schedulers across ranks.

Equal gradients keep replicas equal only if every rank's optimizer does the same with them. A
learning rate that depends on the rank lets the replicas drift apart without any error.
"""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import ReplicasDifferError
from lockstep.sync import is_local

if TYPE_CHECKING:
    from lockstep.group import Group
    from lockstep.operator.training_parts import TrainingParts


def compare_optimizers(group: Group, registered: TrainingParts) -> None:
    """Compare the optimizers and schedulers of all ranks; raise on every rank or on none.

    Parameters marked `lockstep.local` differ by design, and so may a group of only such ones.

    Collective:
        Every rank. Two small all-gathers.

    Raises:
        ReplicasDifferError: names the first difference and the ranks.
    """
    everyone = group.exchange(_description(registered))
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
            fix="make the same on every rank, or mark parameters that differ by design:"
            " lockstep.local(...)",
        )


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
