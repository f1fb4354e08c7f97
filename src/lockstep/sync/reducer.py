# SPDX-License-Identifier: Apache-2.0
"""`Reducer`: one round of reduction, in which buckets are sent, summed, divided and written back.

Invariants:

- Every rank starts the same collectives in the same order, whichever parameters its backward
  used: bucket 0, 1, ... Nothing decides *whether* a bucket is sent, only *when*, and the last one
  leaves only when backward has ended.
- After a round every rank holds the same gradients, bit for bit: each rank divides the same sum
  by the same number.
- A rank that has to refuse a round reports it in the tail, and all ranks refuse together, so
  that none waits for one that has raised.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

import torch

from lockstep.expected_exchange import is_exchange_expected
from lockstep.sync.bucket_order import BucketOrder
from lockstep.sync.buckets import Bucket, Layout, Slot
from lockstep.sync.round_contribution import Contribution, Fault, RoundTotals, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.group import Group
    from lockstep.pending_collective import Pending


class Reducer:
    """The buckets of some parameters over one group.

    Args:
        slots: the parameters that take part; the same on every rank.
        group: the ranks.
        cap_bytes: how large a bucket may grow.
        signature: tells the rounds of one model from those of another; below 64.
        combine: sums a full bucket over the ranks, in the place of an all-reduce, and waits.
        divides: by the weights of all ranks; False leaves the sum.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        group: Group,
        cap_bytes: int,
        signature: int = 0,
        *,
        combine: Callable[[Group, Bucket], Pending] | None = None,
        divides: bool = True,
    ) -> None:
        self._divides = divides
        # Gradients are multiplied by 1/size when packed; with equal weights the sum then needs no
        # division.
        self._share = 1.0 / group.size if divides and combine is None else 1.0
        self.layout = Layout(slots, cap_bytes)
        self.bucket_order = BucketOrder(group, (b.flat.device for b in self.layout.buckets))
        self._group: Group | None = group
        self._combine = combine
        self._next = 0
        self._signature = signature
        self._round = 0
        # Autograd has a thread for each device: of a rank with several, gradients arrive at once.
        self._arriving = threading.RLock()
        self.contribution = Contribution()

    @property
    def has_launched(self) -> bool:
        return self._next > 0

    @property
    def can_overlap(self) -> bool:
        """Whether buckets may leave while backward still runs."""
        several = self._combine is None and len(self.layout.buckets) > 1
        return several and self.bucket_order.is_known

    def start(self, contribution: Contribution, step: int = 0) -> None:
        """Begin a round of optimizer step `step`. Nothing is communicated yet."""
        self.contribution = contribution
        # Small enough that sums over a thousand ranks are exact in float32. The rounds of two
        # ranks that meet have the same number; their steps differ where one rank left a step
        # out, or ran a backward twice. The odd factor keeps steps up to 255 apart distinct.
        contribution.check = self._signature * 256 + (self._round + 37 * step) % 256
        self.bucket_order.begin()
        self._next = 0
        for bucket in self.layout.buckets:
            bucket.is_launched = False
            bucket.pending = None
            if bucket is not self.layout.buckets[-1]:
                bucket.await_gradients()

    def arrive(self, slot: Slot) -> None:
        """Note that a gradient was accumulated, and send the complete buckets in order.

        Gradient:
            Packed, scaled and on its way when its bucket is complete.

        Collective:
            The next buckets' all-reduces, in order, not waited for. Never the last bucket.
        """
        bucket = slot.bucket
        if bucket is None:
            return
        with self._arriving:
            if bucket.is_launched:
                self.contribution.faults.append(Fault.of("after_bucket_left", [slot.name]))
                return
            bucket.missing.discard(slot.number)
            assert self._group is not None
            if not bucket.missing and not is_exchange_expected(self._group):
                self._launch_complete()

    def _launch_complete(self) -> None:
        buckets = self.layout.buckets
        while self._next < len(buckets) - 1:
            bucket = buckets[self._next]
            if bucket.missing or not bucket.may_leave_early:
                return
            self.bucket_order.before_departure()
            self._launch(bucket)
            self.bucket_order.after_departure()

    def end_backward(self) -> None:
        """Note, for the ranks to compare, among which collectives buckets have left."""
        self.contribution.has_others, followed = self.bucket_order.end()
        if followed:
            assert self._group is not None
            digest = digest_of(self._group.size, self.contribution.digest, *followed)
            self.contribution.digest = digest

    def _launch(self, bucket: Bucket) -> None:
        assert self._group is not None
        with torch.no_grad():
            self._pack(bucket)
            if bucket is self.layout.buckets[-1]:
                self.layout.write_tail(self.contribution.sums(self._share))
            bucket.is_launched = True
            self._next += 1
            bucket.pending = self._sum(self._group, bucket)

    def _sum(self, group: Group, bucket: Bucket) -> Pending:
        """Start the sum of a full bucket; the bucket holds it after ``wait`` of the result.

        Collective:
            Every rank, same order. Does not block. One all-reduce; or what `combine` does.
        """
        if self._combine is not None:
            return self._combine(group, bucket)
        return group.all_reduce(bucket.flat)

    def _pack(self, bucket: Bucket) -> None:
        scale = self.contribution.scale * self._share
        if not self._pack_or_note_fault(bucket, scale) or self.contribution.is_borrowed:
            bucket.fill_with_zeros()
        elif scale == 0.0:
            bucket.payload.zero_()  # NaN times zero is NaN

    def _pack_or_note_fault(self, bucket: Bucket, scale: float) -> bool:
        """Pack a bucket; False, and a fault for all ranks, if a gradient is sparse or misfits."""
        try:
            bucket.pack(scale)
        except RuntimeError:
            faults = _misfits(bucket)
            if not faults:
                raise
            self.contribution.faults += faults
            return False
        return True

    def finish(self, *, must_read: bool = False) -> RoundTotals | None:
        """Send the rest, wait for everything, divide and deliver.

        Args:
            must_read: return the sums even if the host has to wait for them.

        Returns:
            The sums over ranks, or None where reading them would have made the host wait for
            an accelerator although this rank has no need to know them.

        Gradient:
            ``parameter.grad`` becomes sum over ranks / weight over ranks, for what any rank
            used; None for the rest, and with faults for all.

        Collective:
            The remaining buckets' all-reduces; blocks (on an accelerator: the stream).

        Raises:
            PeerLostError: another rank went away.
        """
        for bucket in self.layout.buckets[self._next :]:
            self._launch(bucket)
        for bucket in self.layout.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            bucket.pending = None
        self._next = 0
        self._round += 1
        with torch.no_grad():
            return self._write_gradients(must_read or self._must_read())

    def _write_gradients(self, read: bool) -> RoundTotals | None:
        sums = self.layout.read_sums() if read else None
        if sums is not None and (sums.faults or not sums.weight > 0.0):
            for slot in self.layout.slots:
                slot.param.grad = None
            return sums
        self._divide(sums)
        if not self.used_all():
            for slot, used in zip(self.layout.slots, self._flags(), strict=True):
                if not used:
                    slot.param.grad = None
                elif slot.param.grad is None:
                    slot.param.grad = slot.view
        for bucket in self.layout.buckets:
            bucket.copy_to_kept()
        return sums

    @property
    def reads_are_free(self) -> bool:
        """Whether the host reads the sums without waiting; then every rank reads every round's."""
        return not self.layout.tail.is_cuda

    def _must_read(self) -> bool:
        if self.reads_are_free:
            return True
        own = self.contribution
        said = bool(own.faults) or own.is_edited or own.has_unfrozen or own.has_others
        return own.has_zero_weight or said or not self.used_all()

    def used_all(self) -> bool:
        """Whether this rank had a gradient for every parameter."""
        return all(all(bucket.used) for bucket in self.layout.buckets)

    def _divide(self, sums: RoundTotals | None) -> None:
        if not self._divides or (sums is not None and self.layout.is_unit_weight(sums.weight)):
            return
        if sums is not None and self.reads_are_free:
            for bucket in self.layout.buckets:
                bucket.payload.div_(sums.weight)
            return
        # By a tensor, also on ranks that have read its value: on CUDA a division by a number is a
        # multiplication by its inverse, and some ranks' weights would differ in the last bit.
        weight = self.layout.divisor
        for bucket in self.layout.buckets:
            bucket.payload.div_(weight.to(bucket.payload.device))

    def _flags(self) -> list[bool]:
        if self.used_all():
            return [True] * len(self.layout.slots)
        return self.layout.read_flags()

    def abandon(self) -> None:
        """Forget a round that failed, and every reference to collectives in flight."""
        for bucket in self.layout.buckets:
            if bucket.pending is not None:
                bucket.pending.abandon()
                bucket.pending = None
        self._next = 0
        self.contribution = Contribution()

    def close(self) -> None:
        """Abandon, and turn gradients that are views into tensors of their own."""
        self.abandon()
        self.bucket_order.close()
        self._group = None
        for slot in self.layout.slots:
            if slot.param.grad is slot.view and slot.view is not None:
                slot.param.grad = slot.view.clone(memory_format=torch.preserve_format)
            slot.view = None
            slot.bucket = None


def _misfits(bucket: Bucket) -> list[Fault]:
    """Faults of gradients that do not fit the bucket: sparse, or of changed parameters."""
    pairs = [(slot, grad) for slot in bucket.slots if (grad := slot.param.grad) is not None]
    sparse = [slot.name for slot, grad in pairs if grad.layout is not torch.strided]
    moved = [
        f"{slot.name}` {tuple(view.shape)} {view.dtype} {view.device}, now `{tuple(grad.shape)}"
        f" {grad.dtype} {grad.device}"
        for slot, grad in pairs
        if grad.layout is torch.strided
        and (view := cast("torch.Tensor", slot.view)) is not None
        and (grad.shape, grad.dtype, grad.device) != (view.shape, view.dtype, view.device)
    ]
    found = {"sparse": sparse, "moved": moved}
    return [Fault.of(kind, names) for kind, names in found.items() if names]
