# SPDX-License-Identifier: Apache-2.0
"""`GivenObjects`: a user's own objects, of which an operator class was made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.operator.registration import note_setup
from lockstep.operator.training_parts import SyncOptions, TrainingParts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn


class GivenObjects:
    """A model, its optimizers and its criterion in the driver, of which workers may train copies.

    A scheduler of the user's, or the user, may change settings of the optimizer while several
    workers train copies of it, which then never hear of that.

    Args:
        model: the very object, as the others.
        optimizers: none, where the operator makes them.

    Attributes:
        run: the objects, as a worker has its own, so that a state can be loaded into them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        criterion: Any = None,
    ) -> None:
        self.run = TrainingParts(
            models=[model],
            optimizers=list(optimizers),
            schedulers=[],
            criterion=criterion,
            models_given_alone=True,
            sync=None,
            sync_options=SyncOptions(buffers="manual", averages=True),
        )
        self.note_copies()

    def note_copies(self) -> None:
        """Note that workers have just got copies, to which the changes in a state are relative."""
        note_setup(self.run)
        self.note_settings()

    def note_settings(self) -> None:
        """Note that the copies have the settings that the optimizer has now."""
        self._noted = self._settings()

    def changes(self) -> list[str]:
        """The settings that were changed since the last `note_settings`, as text."""
        return _differences(self._noted, self._settings())

    def differs_from(self, groups: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the settings are others than those in `groups`, as of a copy's state."""
        return bool(_differences(_settings(groups), self._settings()))

    def _settings(self) -> list[dict[str, Any]]:
        return _settings(group for each in self.run.optimizers for group in each.param_groups)


def _settings(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers in parameter groups, and pairs of them; a bool may be a mode, such as `eval`."""
    found = []
    for group in groups:
        values = {name: _as_plain(value) for name, value in group.items() if name != "params"}
        found.append({name: value for name, value in values.items() if _is_numeric(value)})
    return found


def _as_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_plain(each) for each in value]
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_number else value


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _differences(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """What differs of the settings that both have: a scheduler adds some for itself."""
    if len(before) != len(now):
        return [f"{len(before)} -> {len(now)} parameter groups"]
    return [
        f"{name} {old[name]} -> {new[name]}"
        for old, new in zip(before, now, strict=True)
        for name in old
        if name in new and old[name] != new[name]
    ]
