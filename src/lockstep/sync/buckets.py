# SPDX-License-Identifier: Apache-2.0
"""Flat buckets: the memory of the gradients, with flags and sums behind the last bucket.

A bucket is one contiguous tensor per (device, dtype); ``parameter.grad`` is a view into it, so that
a reduced bucket needs no copying back. Buckets are filled in reverse registration order, which is
about the order in which backward finishes them.

Behind the last bucket travels the *tail*: one used-flag per parameter and a few sums. Only the last
bucket can carry the tail, because its numbers are known only when backward has ended. The tail must
hold weights exactly, so where the last bucket is of low precision the tail is a bucket of its own.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from lockstep._torch_compat import (
    copy_each,
    storage_key,
    storage_use_count,
    version_of,
    zero_each,
)
from lockstep.sync.round_contribution import RoundTotals
from lockstep.sync.tensor_reference_counts import (
    are_all_fresh,
    cpp_references,
    fresh_flags,
    python_references,
)
from lockstep.tensor_copies import fresh_strides, is_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.pending_collective import Pending

_EXACT = (torch.float32, torch.float64)

_LONG = 2**15
"""Elements from which a gradient is worth a call of its own, to be scaled while it is copied."""

_LARGE = 4
"""A gradient that fills one part in so many of a bucket closes it."""


class Slot:
    """One synchronised parameter, and the gradient that its last round left there.

    Attributes:
        last_round: the last round of its owner after which it had a gradient.
        last_unused: the last round in which no rank had one.
    """

    def __init__(self, number: int, name: str, param: torch.Tensor, owner: object = None) -> None:
        self.number = number
        self.name = name
        self.param = param
        self.owner = owner
        self.bucket: Bucket | None = None
        self.view: torch.Tensor | None = None
        self.last_round = self.last_unused = 0
        self._reduced: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        # Of a reduced gradient in shards, and its key: no other storage gets that meanwhile.
        self._storage: tuple[torch.UntypedStorage, int] | None = None

    def note_round(self, number: int) -> None:
        """Note that the round of this number has reduced the parameter's gradient, if any rank's.

        Called before gradients of earlier rounds are back in their places.
        """
        if self.param.grad is None:
            self.last_unused = number
        else:
            self.last_round = number

    def mark_local(self) -> None:
        """Note that ``param.grad`` is a gradient of this rank alone."""
        self._reduced = None

    def set_reduced(self, gradient: torch.Tensor | None) -> None:
        """Let ``param.grad`` be `gradient`, which is the same on every rank."""
        if self.param.grad is not gradient:
            self.param.grad = gradient
        if gradient is not None and gradient is not self.view:
            self._reduced, self._version = weakref.ref(gradient), version_of(gradient)
            self._storage = None
            if is_shard(gradient):
                self._storage = gradient.untyped_storage(), storage_key(gradient)

    @property
    def holds_reduced(self) -> bool:
        """Whether ``param.grad`` is the tensor that the last round left there."""
        grad = self.param.grad
        if grad is None:
            return False
        return grad is self.view or (self._reduced is not None and self._reduced() is grad)

    @property
    def is_untouched(self) -> bool:
        """Whether ``param.grad`` is that tensor, unwritten since its round or `accept_changes`."""
        grad = self.param.grad
        if grad is None or not self.holds_reduced:
            return False
        in_bucket = grad is self.view and self.bucket is not None
        known = self.bucket.reduced_version if in_bucket and self.bucket else self._version
        return version_of(grad) == known

    @property
    def has_assigned_data(self) -> bool:
        """Whether ``param.grad`` is that tensor, in shards, to whose ``data`` another was assigned.

        Its rows, which optimizers read, take no notice.
        """
        known, grad = self._storage, self.param.grad
        if known is None or grad is None or not self.holds_reduced:
            return False
        return storage_key(grad) != known[1]

    def accept_changes(self) -> None:
        """Note that an optimizer has used the gradient as it is now."""
        grad = self.param.grad
        if grad is None or not self.holds_reduced:
            return
        if grad is self.view and self.bucket is not None:
            self.bucket.reduced_version = version_of(grad)
        else:
            self._version = version_of(grad)


class Bucket:
    """Some parameters' gradients, reduced by one collective.

    Its memory is lent: after a round ``parameter.grad`` is a view of it, which saves a copy.
    Before the bucket writes again it counts references: where a list of gradients, an alias or a
    graph still holds such a view, the memory is left to it, and the bucket takes other memory.
    A gradient that the user holds, or that lies in the user's own memory, stays
    ``parameter.grad`` and gets the reduced values by a copy.

    Attributes:
        reduced_version: the version of the views after the last round.
        kept: the parameters whose gradient tensor stays ``parameter.grad``.
    """

    def __init__(
        self, slots: Sequence[Slot], device: torch.device, dtype: torch.dtype, tail: int
    ) -> None:
        self._size = sum(length_of(slot.param) for slot in slots)
        # Complex numbers first: as pairs of reals they must start at an even place.
        self.slots = sorted(slots, key=lambda slot: not slot.param.is_complex())
        self.numbers = frozenset(slot.number for slot in slots)
        self._params = [slot.param for slot in self.slots]
        self._all_used = [True] * len(self.slots)
        self._is_long = bool(self.slots) and self._size >= _LONG * len(self.slots)
        self.used = self._all_used
        self.missing: set[int] = set()
        self.pending: Pending | None = None
        self.is_launched = False
        self.may_leave_early = True
        self.kept: list[Slot] = []
        self._take_memory(device, dtype, tail)

    def _take_memory(self, device: torch.device, dtype: torch.dtype, tail: int) -> None:
        # Not zeros: `pack` writes the whole bucket before it is sent.
        self.flat = torch.empty(self._size + tail, device=device, dtype=dtype)
        self.payload = self.flat[: self._size]
        self.tail = self.flat[self._size :]
        self.views: list[torch.Tensor] = []
        self.reduced_version = 0
        offset = 0
        for slot in self.slots:
            length = length_of(slot.param)
            slot.bucket = self
            slot.view = _view_like(slot.param, self.flat[offset : offset + length])
            self.views.append(slot.view)
            offset += length
        self._held_by_us = self._references()

    def _references(self) -> tuple[list[int], list[int], int]:
        """The numbers of references to each view from Python and from C++, and to the memory."""
        views = self.views
        return python_references(views), cpp_references(views), storage_use_count(self.flat)

    def ensure_unshared(self) -> None:
        """Before a write: take new memory if tensors elsewhere share the present one."""
        if self._references() != self._held_by_us:
            self._take_memory(self.flat.device, self.flat.dtype, len(self.tail))

    def await_gradients(self) -> None:
        """At the start of a backward: wait for the gradients of all parameters not frozen."""
        self.missing = {slot.number for slot in self.slots if slot.param.requires_grad}

    def pack(self, scale: float = 1.0) -> None:
        """Copy every gradient into its view, times `scale`, and note which parameters have one.

        Raises:
            RuntimeError: a gradient that cannot be copied into a strided tensor (sparse), or of
                another shape, dtype or device than the parameter had when the bucket was made.
        """
        self.kept = []
        self.ensure_unshared()
        grads = [param.grad for param in self._params]
        if not (self.slots and self._pack_fresh(grads, scale)):
            self._pack_each(grads)
            if scale != 1.0:
                self.payload.mul_(scale)

    def _pack_each(self, grads: list[torch.Tensor | None]) -> None:
        strays: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        absent: list[torch.Tensor] = []
        replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        fresh = fresh_flags(grads)
        for slot, grad, view, is_ours in zip(self.slots, grads, self.views, fresh, strict=True):
            if grad is None:
                absent.append(view)
            elif grad is not view:
                if grad.shape != view.shape:
                    raise RuntimeError("a gradient of another shape, which a copy may broadcast")
                strays.append(grad)
                places.append(view)
                if is_ours:
                    replaced.append((slot.param, view))
                else:
                    self.kept.append(slot)
        self.used = [grad is not None for grad in grads]
        if strays:
            copy_each(places, strays)
        for param, view in replaced:
            param.grad = view
        if absent:
            zero_each(absent)

    def _pack_fresh(self, grads: list[torch.Tensor | None], scale: float) -> bool:
        """Pack the common case: all gradients exist, fresh from autograd, with no other holder."""
        if not are_all_fresh(grads):
            return False
        if scale != 1.0 and self._is_long:
            if [g.shape for g in grads] != [v.shape for v in self.views]:  # type: ignore[union-attr]
                return False  # `out` would grow, over what lies behind it in memory
            # One pass over memory instead of two, which is what large gradients cost.
            for grad, view in zip(grads, self.views, strict=True):
                torch.mul(grad, scale, out=view)  # type: ignore[arg-type]
        else:
            copy_each(self.views, grads)  # type: ignore[arg-type]
            if scale != 1.0:
                self.payload.mul_(scale)
        for param, view in zip(self._params, self.views, strict=True):
            param.grad = view
        self.used = self._all_used
        return True

    def copy_to_kept(self) -> None:
        """Copy the reduced values into the gradients of `kept`, and note the version."""
        for slot in self.kept:
            grad, view = slot.param.grad, slot.view
            if grad is not None and view is not None and grad is not view:
                slot.set_reduced(grad.copy_(view))
        for slot in self.kept:
            slot.accept_changes()  # views of one tensor have one version together
        self.reduced_version = version_of(self.flat)

    def fill_with_zeros(self) -> None:
        """Contribute zeros, whatever the gradients hold (they may be NaN)."""
        self.payload.zero_()
        self.used = [False] * len(self.slots)


class Layout:
    """The buckets of some parameters, in the order in which they are reduced."""

    def __init__(self, slots: Sequence[Slot], cap_bytes: int) -> None:
        groups = _by_device_and_dtype(reversed(slots))
        # The most exact dtype last, so that the tail travels with a bucket in all but pure
        # low-precision models.
        keys = sorted(groups, key=lambda key: (key[1] in _EXACT, key[1].itemsize))
        pieces = [
            (key, piece)
            for key in keys
            for piece in _cut_into_buckets(groups[key], cap_bytes, key[1].itemsize)
        ]
        size = len(slots) + len(RoundTotals._fields)
        if not pieces or pieces[-1][0][1] not in _EXACT:
            device = pieces[-1][0][0] if pieces else torch.device("cpu")
            exact = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
            pieces.append(((device, exact), []))
        self.buckets = [
            Bucket(piece, device, dtype, tail=size if place == len(pieces) - 1 else 0)
            for place, ((device, dtype), piece) in enumerate(pieces)
        ]
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._written: list[float] | None = None
        self._image = self.tail

    @property
    def tail(self) -> torch.Tensor:
        """Flags, then sums: what travels behind the last bucket."""
        return self.buckets[-1].tail

    @property
    def sums_on_device(self) -> torch.Tensor:
        """The part of the tail behind the flags."""
        return self.tail[len(self.slots) :]

    def write_tail(self, sums: RoundTotals) -> None:
        """Put this rank's flags and sums behind the last bucket."""
        values: list[float] = [flag for bucket in self.buckets for flag in bucket.used]
        values += sums[:-3]
        # Almost every round has the values of the last one, but for its number: keep the tensor.
        if values != self._written:
            self._written = values
            self._image = torch.tensor(
                [*map(float, values), 0.0, 0.0, 0.0], dtype=self.tail.dtype, device=self.tail.device
            )
        self.tail.copy_(self._image)
        self.tail[-3].fill_(sums.check)
        self.tail[-2].fill_(sums.check_squared)
        if sums.earlier:
            self.tail[-1].fill_(sums.earlier)

    def is_unit_weight(self, weight: float) -> bool:
        """Whether a sum of weights is 1, up to the rounding of the tail's dtype."""
        return abs(weight - 1.0) <= 4.0 * torch.finfo(self.tail.dtype).eps

    @property
    def divisor(self) -> torch.Tensor:
        """The sum of weights, of no dimension and where the tail is; 1 for what rounds to it."""
        weight = self.sums_on_device[0]
        is_unit = (weight - 1.0).abs() <= 4.0 * torch.finfo(weight.dtype).eps
        return torch.where(is_unit, 1.0, weight)

    def read_sums(self) -> RoundTotals:
        """The sums over all ranks. On an accelerator this waits for the device."""
        return RoundTotals(*self.sums_on_device.tolist())

    def read_flags(self) -> list[bool]:
        """Which parameters were used by any rank. On an accelerator this waits for the device."""
        return [count > 0 for count in self.tail[: len(self.slots)].tolist()]


def _by_device_and_dtype(
    slots: Iterable[Slot],
) -> dict[tuple[torch.device, torch.dtype], list[Slot]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Slot]] = {}
    for slot in slots:
        key = (slot.param.device, slot.param.dtype.to_real())
        groups.setdefault(key, []).append(slot)
    return groups


def _cut_into_buckets(slots: list[Slot], cap_bytes: int, item_bytes: int) -> list[list[Slot]]:
    """Cut into pieces of at most `cap_bytes`; a large gradient closes its piece.

    Many small gradients are cheaper in one call. A large gradient gains nothing from more in its
    bucket, which would have to wait for the layer below: less of it would overlap backward.
    """
    pieces: list[list[Slot]] = [[]]
    filled = 0
    is_closed = False
    for slot in slots:
        size = length_of(slot.param) * item_bytes
        if pieces[-1] and (is_closed or filled + size > cap_bytes):
            pieces.append([])
            filled = 0
        pieces[-1].append(slot)
        filled += size
        is_closed = size * _LARGE >= cap_bytes
    return pieces


def length_of(param: torch.Tensor) -> int:
    """The numbers that the gradient of `param` takes in a bucket; a complex one is two."""
    return param.numel() * (2 if param.is_complex() else 1)


def _view_like(param: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    if param.is_complex():
        piece = torch.view_as_complex(piece.view(-1, 2))
    # The strides that autograd gives to a fresh gradient: the parameter's, where it is dense
    # (channels_last); others would make the optimizer's kernels slow.
    return piece.as_strided(param.shape, fresh_strides(param), piece.storage_offset())
