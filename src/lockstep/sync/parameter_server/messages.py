# SPDX-License-Identifier: Apache-2.0
"""Messages between the workers and a parameter server: requests, and the server's answers.

A message is a kind, a body of any sort, and tensors. Tensors travel as one block of bytes, so that
nothing large is pickled.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.serialization import pack, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lockstep.randomness import RandomState
    from lockstep.sync.parameter_server.optimizer_attributes import Changes

Groups = list[tuple[dict[str, Any], list[int]]]
"""An optimizer's parameter groups: their settings, and the numbers of their parameters."""


@dataclass
class Message:
    """A request of a worker, or the server's answer.

    Attributes:
        kind: of a request, see `ParameterStore`; of an answer, "done" or "error".
        body: anything that can be pickled.
        tensors: strided, of any dtype and device; they arrive on the CPU.
    """

    kind: str
    body: Any = None
    tensors: Sequence[torch.Tensor] = field(default_factory=list)

    @cached_property
    def packed(self) -> tuple[bytes, torch.Tensor]:
        """The message as bytes: a pickled head, a block of tensors. Made once for all receivers."""
        tensors = [tensor.detach().contiguous() for tensor in self.tensors]
        structure, buffers = split((self.kind, self.body, tensors))
        sizes = [buffer.numel() for buffer in buffers]
        return pickle.dumps((structure, sizes)), pack(buffers)


@dataclass
class OptimizerRequest:
    """The body of a request that concerns one optimizer.

    Attributes:
        number: of the optimizer, among those that the server holds.
        groups: its parameter groups as they are at the worker.
        changed_parameters: numbers of those whose new values lead the message's tensors.
        with_gradient: numbers of those whose gradients follow.
        frozen: numbers of those in the groups that require no gradient.
        state: the state dict that the optimizer is to load.
        of_same_weights: see `lockstep.sync.optimizer_inspection.load_state`.
        inner: whose state is asked for, or to be loaded: the place of an optimizer among those
            within it; None: its own.
        undo_point: steps of the run to which an interruption leads back; None: to none.
        attributes: those of the optimizer, and marks of its parameters, that have changed at the
            worker since its last step.
        random_state: the state of rank 0's generators, from which a step draws at the server.
    """

    number: int
    groups: Groups
    changed_parameters: list[int] = field(default_factory=list)
    with_gradient: list[int] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)
    state: Any = None
    of_same_weights: bool = False
    inner: int | None = None
    undo_point: int | None = None
    attributes: Changes = field(default_factory=dict)
    random_state: RandomState | None = None


class Channel(Protocol):
    """A worker's connection to its parameter server."""

    def ask(self, message: Message) -> Message:
        """Send a request and wait for its answer.

        Collective:
            A request in which all ranks take part is answered when all have sent it.

        Raises:
            PeerLostError: the server, or a worker that it waited for, went away.
            Whatever the server refused the request with.
        """

    def close(self) -> None:
        """Leave; idempotent."""
