# SPDX-License-Identifier: Apache-2.0
"""What the probe remembers between two steps, a class for each kind."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from lockstep.audit.facts import Gathered, UsedBuffers
    from lockstep.audit.finding import Place
    from lockstep.audit.probe.graphs import Mark

_LOOKS: Final = 16
"""At modules that are evaluated and have no buffers, nor have their parts, between two steps."""
_FORWARDS: Final = 256
"""Of one module between two steps, before which it is asked whether its buffers were written."""

Versions = list[tuple[int, int]]


@dataclass
class Arrival:
    """What one collective brought.

    Attributes:
        origin: what the rules are told of it.
        detached: what was sent had no gradient.
        tensors: those that it was written to.
        memory: theirs, and where it is.
        joined: the operations that put them together with rows that have a gradient.
        others: directions of some rows that are only other ranks'.
        own: directions of some rows that this rank sent.
        sent_from: where these lay.
    """

    origin: Gathered
    detached: bool = False
    tensors: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    memory: list[tuple[StorageWeakRef, int]] = field(default_factory=list)
    joined: list[Mark] = field(default_factory=list)
    others: torch.Tensor | None = None
    own: torch.Tensor | None = None
    sent_from: tuple[StorageWeakRef, int] | None = None
    width: int = 0

    def living(self) -> list[torch.Tensor]:
        return [t for reference in self.tensors if (t := reference()) is not None]

    def is_sent_back(self) -> bool:
        """A stage of a pipeline gives what it was sent a gradient, and sends it back."""
        return any(t.is_leaf and t.requires_grad for t in self.living())


@dataclass
class Evaluated:
    """What is known of the evaluation since the last optimizer step.

    Attributes:
        step: the steps before it.
        looks: so many modules are looked at until one has buffers.
        module: that one.
        written: how often its buffers had been, when they were written down.
        before: and when its last forward began.
        again: they were written once more, and that was written down.
        forwards: so many of them are still asked for it.
    """

    step: int = -1
    looks: int = _LOOKS
    module: weakref.ref[torch.nn.Module] | None = None
    written: Versions = field(default_factory=list)
    before: Versions = field(default_factory=list)
    again: bool = False
    forwards: int = _FORWARDS


class Known(NamedTuple):
    """What is known of a module: is it frozen, and one of its parameters that once was not?"""

    module: weakref.ref[Any]
    frozen: bool
    trained: weakref.ref[Any] | None = None

    def has_changed(self) -> bool:
        """Was it looked at when it was trained, and is it perhaps frozen by now?"""
        param = None if self.frozen or self.trained is None else self.trained()
        return param is not None and not param.requires_grad


@dataclass
class Schedule:
    """One that was made, and how far it had come after the first step of its optimizer.

    Attributes:
        where: it was made.
        began: its ``last_epoch`` then, and None before.
    """

    ref: weakref.ref[Any]
    where: list[Place]
    began: int | None = None


@dataclass
class Reduced:
    """A sum over ranks in the place of what autograd has computed.

    Attributes:
        result: what was computed.
        value: the same without its graph, where it is small: the program may let the result go.
        mark: of the operation that computed it.
        origin: what the rules are told of it.
        held: the result itself, of the last few sums that have a backward. Hooks of its own, which
            that backward goes through, are seen on it alone.
        through_data: of a sum that was made through ``.data``, its norm and the number that
            autograd's next operation was to have.
    """

    result: weakref.ref[torch.Tensor]
    value: torch.Tensor | None
    mark: Mark
    origin: Gathered
    held: torch.Tensor | None
    through_data: tuple[float, int] | None = None


class KeptBuffers:
    """What is known of the buffers of one module that training calls.

    Attributes:
        fact: None where it has none that matter.
        step: the optimizer steps before the last look.
    """

    def __init__(self, module: torch.nn.Module, fact: UsedBuffers | None) -> None:
        self.module = weakref.ref(module)
        self.fact = fact
        self.step = -1
        self._versions: list[tuple[int, int]] = []

    def has_changed(self, buffers: list[torch.Tensor]) -> bool:
        """Were they written to, or replaced, since this was asked last?"""
        before, self._versions = self._versions, [(id(b), b._version) for b in buffers]
        return before != self._versions
