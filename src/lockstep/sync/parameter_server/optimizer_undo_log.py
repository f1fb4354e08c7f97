# SPDX-License-Identifier: Apache-2.0
"""Undo log of a parameter server: copies of optimizers and parameters from before their last steps.

When a worker dies, the server may have made a step that no surviving worker has counted. The
workers then go back to the step before, and the server has to go back with them.

The log copies only what a step is about to change, just before: the optimizer's state, its own
attributes, its groups, and its parameters with their marks. Copies of tensors go into memory that
is used again for the next step, so that a log costs one copy of the state and no allocation. The
rest is deep-copied, with a memo that says where the copy of each tensor lies.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from lockstep.error_texts import LOAD_LAST
from lockstep.errors import ReplicasDifferError
from lockstep.sync.optimizer_inspection import (
    inner_optimizers,
    optimizer_parameters,
    own_attributes,
    state_tensors,
)
from lockstep.sync.parameter_server.optimizer_attributes import marks_of
from lockstep.tensor_copies import TensorCopies

if TYPE_CHECKING:
    from torch.optim import Optimizer


class OptimizerUndoLog:
    """Copies of optimizers, and of their parameters, as they were when the run had `point` steps.

    Attributes:
        point: the count of steps that an undo returns to; None: there is nothing to undo.
    """

    def __init__(self) -> None:
        self.point: int | None = None
        self._kept: list[_OptimizerCopy] = []
        self._memory: dict[int, TensorCopies] = {}

    def log_change(self, optimizer: Optimizer, point: int | None) -> None:
        """Copy `optimizer`, which is about to step or to load a state.

        Args:
            point: steps of the run to which an interruption now leads back; None: this
                change is never undone.
        """
        if point != self.point:
            self._kept, self.point = [], point
        if point is None or any(kept.optimizer is optimizer for kept in self._kept):
            return
        memory = self._memory.setdefault(id(optimizer), TensorCopies())
        self._kept.append(_OptimizerCopy(optimizer, memory))

    def return_to(self, committed: int) -> None:
        """Undo every change since `committed` steps of the run.

        Raises:
            ReplicasDifferError: the log begins at a later step.
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
                fix=LOAD_LAST,
            )
        # A parameter may belong to several optimizers: the first copy holds its original value.
        for each in reversed(kept):
            each.put_back()
        self._memory.clear()  # the copies are the optimizers' own now


class _OptimizerCopy:
    """One optimizer and its parameters as they are now.

    Args:
        memory: copies of an earlier step, which this one overwrites.
    """

    def __init__(self, optimizer: Optimizer, memory: TensorCopies) -> None:
        self.optimizer = optimizer
        self._held = optimizer_parameters(optimizer)
        inner = inner_optimizers(optimizer)
        states = (tensor for each in (optimizer, *inner) for tensor in state_tensors(each))
        tensors = {id(tensor): tensor for tensor in (*self._held, *states)}
        memory.take([tensor.detach() for tensor in tensors.values()])
        self._tensors = memory.values
        memo = dict(zip(tensors, memory.values, strict=True))
        # In groups, and as keys of the state, parameters stay the objects that they are.
        memo |= {id(param): param for param in self._held}
        attributes = {**own_attributes(optimizer), "param_groups": optimizer.param_groups}
        # As copies of all optimizers, those of optimizers within it lack their own attributes.
        within = [(each, own_attributes(each)) for each in inner]
        self._state, self._attributes, copies = copy.deepcopy(
            (dict(optimizer.state), attributes, within), memo
        )
        for copied, own in copies:
            vars(copied).update(own)
        self._marks = [copy.deepcopy(marks_of(param)) for param in self._held]
        pairs = zip(inner, copies, strict=True)
        self._sharing = [copied for each, (copied, _) in pairs if each.state is optimizer.state]

    def put_back(self) -> None:
        """Let the optimizer hold the copies."""
        for param, value in zip(self._held, self._tensors, strict=False):
            param.data = value
        for param, marks in zip(self._held, self._marks, strict=True):
            for name in marks_of(param):
                delattr(param, name)
            vars(param).update(marks)
        optimizer = self.optimizer
        optimizer.state.clear()
        optimizer.state.update(self._state)
        for each in self._sharing:
            each.state = optimizer.state
        for name in own_attributes(optimizer):
            delattr(optimizer, name)
        vars(optimizer).update(self._attributes)
