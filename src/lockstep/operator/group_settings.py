# SPDX-License-Identifier: Apache-2.0
"""Settings of an optimizer's parameter groups, for ranks that have run no forward of a batch.

A `compute_loss` may set them (a warm-up: ``group["lr"] = ...``). A rank whose shards are empty does
not call it, and would step with other settings than its peers.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.group import Group


Settings = list[list[dict[str, Any]]]
"""The numbers among the settings, by optimizer and parameter group."""


def read_group_settings(optimizers: Sequence[torch.optim.Optimizer]) -> Settings:
    return [[_numbers_in(group) for group in one.param_groups] for one in optimizers]


def share_group_settings(
    group: Group,
    optimizers: Sequence[torch.optim.Optimizer],
    before: Settings,
    *,
    has_computed: bool,
) -> None:
    """Let ranks without samples take what the forwards of the first rank with samples have set.

    Not all settings: a rank may have others by design, for parameters that are its own.

    Args:
        optimizers: the same on every rank.
        before: the settings before the forwards of this batch.
        has_computed: this rank has run forwards of this batch.

    Gradient:
        None: metadata only.

    Collective:
        Every rank of `group`. Blocks. One small exchange.

    Raises:
        PeerLostError: another rank went away.
    """
    changed = [
        [
            {name: value for name, value in now.items() if then.get(name) != value}
            for now, then in zip(*each, strict=False)
        ]
        for each in zip(read_group_settings(optimizers), before, strict=True)
    ]
    told = group.exchange(changed if has_computed else None)
    theirs = next((settings for settings in told if settings is not None), None)
    if has_computed or theirs is None:
        return
    for optimizer, settings in zip(optimizers, theirs, strict=True):
        for held, values in zip(optimizer.param_groups, settings, strict=False):
            for name, value in values.items():
                _set(held, name, value)


def _numbers_in(settings: dict[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            numbers[name] = value.item()
        elif isinstance(value, tuple | list):
            plain = [_as_number(each) for each in value]
            if None not in plain:
                numbers[name] = plain
        elif (number := _as_number(value)) is not None:
            numbers[name] = number
    return numbers


def _as_number(value: Any) -> bool | int | float | None:
    """A number as one of Python's, which the exchange can send; None for anything else."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


def _set(settings: dict[str, Any], name: str, value: Any) -> None:
    held = settings.get(name)
    if isinstance(held, torch.Tensor):  # schedulers and compiled steps know the object
        held.fill_(value)
    else:
        is_tuple = isinstance(value, list) and not isinstance(held, list)
        settings[name] = tuple(value) if is_tuple else value
