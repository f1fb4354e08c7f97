# SPDX-License-Identifier: Apache-2.0
"""What the ways to synchronise have in common whose gradients come in windows.

Which peers there are, what a batch weighs and when a window is open does not depend on who
carries the gradients: our own buckets, or torch's DDP. What a backward sets in motion does.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep import reduction
from lockstep.errors import WeightError
from lockstep.sync import verdict
from lockstep.sync.buckets import Slot
from lockstep.sync.inventory import agree_on_values
from lockstep.sync.window import Window, checked_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from lockstep.group import Group
    from lockstep.sync.inventory import Inventory
    from lockstep.sync.window import Units


class WindowedSync:
    """One rank's side of it; what is left of `Synchroniser` is the subclass's.

    Args:
        group: the peers; until `detach`.
        found: what is synchronised, after the ranks have agreed on it.
        units: of its weights.

    Attributes:
        place: this rank among its peers, for errors.
        rounds: how many reductions there have been.
    """

    def __init__(self, group: Group, found: Inventory, units: Units) -> None:
        self.place = f"rank {group.rank} of {group.size}"
        self.rounds = 0
        self._group: Group | None = group
        self._buffers = list(found.buffers.values())
        self._slots = [
            Slot(number, name, param, self)
            for number, (name, param) in enumerate(found.parameters.items())
        ]
        self._units = units
        self._window = Window()
        self._delivered: float | WeightError | None = None
        self._is_paused = False
        self._is_broken = False

    def expect_weight(self, total: float | None) -> None:
        """What all ranks' batches of a usual step weigh; a step that does needs no division.

        The same on every rank; the result does not depend on it.
        """
        self._units.expect(total)

    def set_delivered_weight(self, weight: float | WeightError | None) -> None:
        """Say what the batch counts for whose plain ``loss.backward()`` comes next.

        Args:
            weight: samples or tokens; None: one per rank (torch's mean over ranks); an error:
                to raise from the next backward without an explicit weight, on this rank alone,
                before it communicates.

        Gradient:
            Applied in the buckets, at the reduction.

        Collective:
            None.

        Raises:
            WeightError: negative, NaN or infinite.
        """
        is_number = weight is not None and not isinstance(weight, WeightError)
        self._delivered = checked_weight(weight, self.place) if is_number else weight
        reduction.deliver(None if isinstance(self._delivered, WeightError) else self._delivered)

    def delivered_weight(self) -> float | None:
        """What `set_delivered_weight` was given last; raised, if it was an error."""
        if isinstance(self._delivered, WeightError):
            raise self._delivered
        return self._delivered

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate on this rank; the next backward outside closes the window.

        Gradient:
            Weighted backwards of the window are divided once by all their weights; plain ones
            add up, as in torch.

        Collective:
            None inside the block.
        """
        before = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before

    def agree_on_values(self) -> None:
        """Refuse to go on if the parameters differ between ranks.

        Gradient:
            None: metadata only.

        Collective:
            Every rank. Two small all-gathers.

        Raises:
            ReplicasDifferError: on every rank; names the parameters and the ranks.
        """
        agree_on_values(self.attached(), {slot.name: slot.param for slot in self._slots})

    def may_go_back_to(self, step: int | None) -> None:
        """See `Synchroniser`; here each rank keeps what it needs for that itself."""

    def has_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `Synchroniser`; here optimizers step where they are."""
        return False

    @property
    def needs_guard(self) -> bool:
        """A rank alone has whole gradients, however it got them."""
        return self._group is not None and self._group.size > 1

    @property
    def has_open_window(self) -> bool:
        """Gradients have arrived since the last round."""
        return self._window.kind is not None

    def attached(self) -> Group:
        """The group, while gradients can be reduced over it.

        Raises:
            NotAvailableError: after `detach`.
            GradientNotReducedError: an earlier failure left the ranks at different places.
        """
        if self._group is None:
            raise verdict.detached(self.place)
        if self._is_broken:
            raise verdict.broken(self.place)
        return self._group

    def _buffer_tensors(self) -> list[torch.Tensor]:
        return [tensor for place in self._buffers if (tensor := place.tensor()) is not None]
