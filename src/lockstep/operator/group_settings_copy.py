# SPDX-License-Identifier: Apache-2.0
"""`GroupSettingsCopy`: the settings of optimizers' parameter groups, copied to be restored.

A learning rate may be a tensor, into which schedulers write. The object itself is kept beside the
copy of its value: a compiled step reads that object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lockstep.sync.tensor_bits import same_bits
from lockstep.tensor_copies import TensorCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class GroupSettingsCopy:
    """The settings of all groups of `optimizers` as they are now."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._groups = [[_settings_of(group) for group in one.param_groups] for one in optimizers]
        self._tensors = [
            value
            for groups in self._groups
            for group in groups
            for value in group.values()
            if isinstance(value, torch.Tensor)
        ]
        self._values = TensorCopies()
        self._values.take(self._tensors)

    def restore(self) -> None:
        """Give all groups the settings that were copied, and drop groups that came later."""
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            # The step calls `add_param_group` again when it is repeated.
            del optimizer.param_groups[len(groups) :]
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                for new in group.keys() - settings.keys() - {"params"}:
                    del group[new]
                group.update(settings)
        self._values.restore(self._tensors)

    def values(self) -> list[list[dict[str, Any]]]:
        """What was copied, by optimizer and group, with the copies in the place of tensors."""
        copies = dict(zip(map(id, self._tensors), self._values.values, strict=True))
        return [
            [
                {key: copies.get(id(value), value) for key, value in group.items()}
                for group in groups
            ]
            for groups in self._groups
        ]

    def has_values_of(self, other: GroupSettingsCopy) -> bool:
        """Whether both copies hold the same settings of the same groups."""
        mine, theirs = self.values(), other.values()
        if [len(groups) for groups in mine] != [len(groups) for groups in theirs]:
            return False
        return all(
            one.keys() == two.keys() and all(_is_equal(one[key], two[key]) for key in one)
            for groups in zip(mine, theirs, strict=True)
            for one, two in zip(*groups, strict=True)
        )

    def put_into(self, state: dict[str, Any], take: Callable[[Any], Any]) -> None:
        """Put what was copied into the optimizers' ``state_dict``s in a `state` of the run.

        Args:
            take: copies values for the state.
        """
        for saved, groups in zip(state["optimizers"], self.values(), strict=False):
            for held, settings in zip(saved.get("param_groups", ()), groups, strict=False):
                held.update(take(settings))


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    return one is other or bool(one == other)
