# SPDX-License-Identifier: Apache-2.0
"""What optimizers' steps change, as it was before: a step may have to be taken back.

A worker that dies may take a step with it that the owner of the parameters has made and that no
worker has counted. Copied is only what a step is about to change, when it is: the optimizer's
state and its parameters, into memory that is used again for the next step.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import STEPS_ARE_SCALED, WAS_STEPPED, copy_each
from lockstep.errors import ReplicasDifferError
from lockstep.sync.buffers import fits, is_block, is_expanded, write_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

REPLACED: Final = ("step", "state_dict", "load_state_dict", STEPS_ARE_SCALED)
"""Of an optimizer whose steps happen elsewhere."""

_ABOUT_STEPPING: Final = frozenset({*REPLACED, WAS_STEPPED, "grad_scale", "found_inf"})


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
        self._memory: dict[int, list[torch.Tensor]] = {}

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
        self._kept.append(_Kept(optimizer, self._memory.setdefault(id(optimizer), [])))

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


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in a structure."""

    number: int


class _Kept:
    """One optimizer and its parameters as they are now.

    Args:
        memory: copies that nobody needs any more; holds the new ones afterwards.
    """

    def __init__(self, optimizer: Optimizer, memory: list[torch.Tensor]) -> None:
        self.optimizer = optimizer
        self._held = [param for group in optimizer.param_groups for param in group["params"]]
        apart = _Apart(self._held)
        self._state = apart.take(dict(optimizer.state))
        # An optimizer may count in its groups, too.
        others = {**own_attributes(optimizer), "param_groups": optimizer.param_groups}
        self._others = apart.take(others)
        copy_over(apart.tensors, memory)
        self._tensors = memory

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

    def take(self, value: Any) -> Any:
        """`value` with the places of its tensors."""
        if id(value) in self._held:
            return value
        if isinstance(value, torch.Tensor):
            return self._place_of(value)
        if type(value) is dict:
            return {key: self.take(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.take(item) for item in value)
        if isinstance(value, int | float | str | None):
            return value
        return copy.deepcopy(value, dict(self._held))

    def _place_of(self, tensor: torch.Tensor) -> _Place:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = _Place(len(self.tensors))
            self.tensors.append(tensor.detach())
        return self._places[id(tensor)]


def _put_together(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.number]
    if type(value) is dict:
        return {key: _put_together(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_together(item, tensors) for item in value)
    return value


def copy_over(values: Sequence[torch.Tensor], into: list[torch.Tensor]) -> None:
    """Copies of `values` in `into`, whose memory is used again where it fits; no host waits."""
    if len(values) != len(into):
        into.clear()
    places = [
        n for n, (value, old) in enumerate(zip(values, into, strict=False)) if fits(value, old)
    ]
    overwrite([into[n] for n in places], [values[n] for n in places])
    held = {n: into[n] for n in places}
    into[:] = [held[n] if n in held else value.detach().clone() for n, value in enumerate(values)]


def overwrite(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Each of `targets` gets the value of its counterpart."""
    plain: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            if _is_plain(target):
                plain.append(target)
                theirs.append(value)
            else:
                write_into(target, value)
        if plain:
            copy_each(plain, theirs)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Every element is a number of its own in memory, as it is."""
    if not is_block(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    return not is_expanded(tensor)
