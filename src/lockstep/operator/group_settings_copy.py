# SPDX-License-Identifier: Apache-2.0
"""`GroupSettingsCopy`: the settings of optimizers' parameter groups, copied to be restored.

A learning rate may be a tensor, into which schedulers write. The object itself is kept beside the
copy of its value: a compiled step reads that object.
"""

from __future__ import annotations

import copy
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
        self._tensors = _tensors_in(self._groups)
        self._saved = TensorCopies()
        self._saved.take(self._tensors)

    def restore(self) -> None:
        """Give all groups the settings that were copied, and drop groups that came later."""
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            # The step calls `add_param_group` again when it is repeated.
            del optimizer.param_groups[len(groups) :]
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                for new in group.keys() - settings.keys() - {"params"}:
                    del group[new]
                group.update(settings)
        self._saved.restore(self._tensors)

    def values(self) -> list[list[dict[str, Any]]]:
        """What was copied, by optimizer and group, with the copies in the place of tensors."""
        copies = self._copies()
        return [
            [
                {key: copies.get(id(value), value) for key, value in group.items()}
                for group in groups
            ]
            for groups in self._groups
        ]

    def _copies(self) -> dict[int, torch.Tensor]:
        return dict(zip(map(id, self._tensors), self._saved.values, strict=True))

    def with_changes(
        self, earlier: GroupSettingsCopy, later: GroupSettingsCopy
    ) -> GroupSettingsCopy:
        """This copy, with those settings of `later` that are not as in `earlier`.

        All three are of the same optimizers. One that has got or lost groups since `earlier` has
        all its settings from `later`.
        """
        result, copies, new_copies = copy.copy(self), self._copies(), later._copies()
        result._groups = []
        every = zip(self._groups, later._groups, earlier.values(), later.values(), strict=True)
        for mine, new, before, now in every:
            if len(before) != len(now):
                mine, before = [{} for _ in now], [{} for _ in now]
            result._groups.append([])
            for own, group, one, two in zip(mine, new, before, now, strict=False):
                differing = _differing_keys(one, two)
                kept = {key: value for key, value in own.items() if key not in differing}
                taken = {key: group[key] for key in differing & group.keys()}
                result._groups[-1].append(kept | taken)
                copies |= {id(t): new_copies[id(t)] for t in _tensors_in([[taken]])}
        result._tensors = _tensors_in(result._groups)
        result._saved = TensorCopies()
        result._saved.values = [copies[id(tensor)] for tensor in result._tensors]
        return result

    def has_values_of(self, other: GroupSettingsCopy) -> bool:
        """Whether both copies hold the same settings of the same groups."""
        mine, theirs = self.values(), other.values()
        if [len(groups) for groups in mine] != [len(groups) for groups in theirs]:
            return False
        return all(
            not _differing_keys(one, two)
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


def _tensors_in(every: Sequence[Sequence[dict[str, Any]]]) -> list[torch.Tensor]:
    return [
        value
        for groups in every
        for group in groups
        for value in group.values()
        if isinstance(value, torch.Tensor)
    ]


def _differing_keys(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    differing = one.keys() ^ other.keys()
    return differing | {
        key for key in one.keys() & other.keys() if not _is_equal(one[key], other[key])
    }


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    return one is other or bool(one == other)
