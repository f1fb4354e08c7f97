# SPDX-License-Identifier: Apache-2.0
"""What optimizers' steps change, as it was before: a step may have to be taken back.

A worker that dies may take a step with it that the owner of the parameters has made and that no
worker has counted. Copied is only what a step is about to change, when it is: the optimizer's
state and its parameters, into memory that is used again for the next step.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import ReplicasDifferError
from lockstep.tensor_copies import TensorCopies
from lockstep.tensor_tree import tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

REPLACED: Final = ("step", "state_dict", "load_state_dict", "_step_supports_amp_scaling")
"""Of an optimizer whose steps happen elsewhere."""

_ABOUT_STEPPING: Final = frozenset({*REPLACED, "_opt_called", "grad_scale", "found_inf"})


@cache
def _bare() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros((), device="cpu")])))


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer holds beside what all of them do; copies and pickles leave it out."""
    skipped = _bare() | _ABOUT_STEPPING
    return {name: value for name, value in vars(optimizer).items() if name not in skipped}


class OptimizerUndoLog:
    """Copies of optimizers, and of their parameters, from before the steps of one point.

    Attributes:
        point: the steps of the run that are taken back together are those from this count on;
            None: there is nothing to take back.
    """

    def __init__(self) -> None:
        self.point: int | None = None
        self._kept: list[_Kept] = []
        self._memory: dict[int, TensorCopies] = {}

    def about_to_change(self, optimizer: Optimizer, point: int | None) -> None:
        """`optimizer` is about to step, or to load a state.

        Args:
            point: steps of the run to which an interruption now leads back; None: nobody will
                ask for it.
        """
        if point != self.point:
            self._kept, self.point = [], point
        if point is None or any(kept.optimizer is optimizer for kept in self._kept):
            return
        self._kept.append(_Kept(optimizer, self._memory.setdefault(id(optimizer), TensorCopies())))

    def return_to(self, committed: int) -> None:
        """Take back what happened from `committed` steps of the run on.

        Raises:
            ReplicasDifferError: that is longer ago than what was kept.
        """
        point, self.point = self.point, None
        kept, self._kept = self._kept, []
        if point is None or committed > point:
            return
        if committed < point:
            raise ReplicasDifferError(
                "the parameter server has gone on further than the workers that are left",
                where=f"after step {committed}",
                expected=f"a worker that has come to step {point}",
                cause="the loop closes its accumulation windows at different steps on different"
                " ranks, and a rank that was ahead died",
                fix="load the last checkpoint into a new trainer",
            )
        # A parameter may belong to several: the one that stepped first knows how it was.
        for each in reversed(kept):
            each.put_back()
        self._memory.clear()


class _Place:
    """Stands for a tensor in a structure; a leaf of it, and so no dataclass."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Kept:
    """One optimizer and its parameters as they are now.

    Args:
        memory: copies that nobody needs any more; holds the new ones afterwards.
    """

    def __init__(self, optimizer: Optimizer, memory: TensorCopies) -> None:
        self.optimizer = optimizer
        self._held = [param for group in optimizer.param_groups for param in group["params"]]
        apart = _Apart(self._held)
        self._state = apart.take(dict(optimizer.state))
        # An optimizer may count in its groups, too.
        others = {**own_attributes(optimizer), "param_groups": optimizer.param_groups}
        self._others = apart.take(others)
        memory.take(apart.tensors)
        self._tensors = memory.values

    def put_back(self) -> None:
        """The copies become the optimizer's own."""
        for param, value in zip(self._held, self._tensors, strict=False):
            param.data = value
        optimizer = self.optimizer
        optimizer.state.clear()
        optimizer.state.update(_put_together(self._state, self._tensors))
        for name in own_attributes(optimizer):
            delattr(optimizer, name)
        vars(optimizer).update(_put_together(self._others, self._tensors))


class _Apart:
    """Structures, and apart from them the tensors in them, each once.

    Args:
        held: parameters, which stay the objects that they are; the first of the tensors.
    """

    def __init__(self, held: Sequence[torch.Tensor]) -> None:
        self.tensors: list[torch.Tensor] = [param.detach() for param in held]
        self._held = {id(param): param for param in held}
        self._places: dict[int, _Place] = {}

    def take(self, tree: Any) -> Any:
        """`tree` with the places of its tensors."""
        return tree_map(self._taken, tree)

    def _taken(self, value: Any) -> Any:
        if id(value) in self._held:
            return value
        if isinstance(value, torch.Tensor):
            return self._place_of(value)
        if isinstance(value, int | float | str | None):
            return value
        return copy.deepcopy(value, dict(self._held))

    def _place_of(self, tensor: torch.Tensor) -> _Place:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = _Place(len(self.tensors))
            self.tensors.append(tensor.detach())
        return self._places[id(tensor)]


def _put_together(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    return tree_map(lambda leaf: tensors[leaf.number] if isinstance(leaf, _Place) else leaf, tree)
