# SPDX-License-Identifier: Apache-2.0
"""Gradient sync that hangs on the parameters: no wrapper, no way round.

A hook on every parameter notes that a gradient has arrived. The first one of a backward asks
for a call when that backward ends; there the round is finished, so that when ``backward``
returns the gradients are the global ones. `GradientSync.backward` drives the round itself.

Everything that a backward can reach goes through here, whichever method of the model, or none,
computed the loss. Rejected: hooks on ``forward`` (custom methods and ``model.module`` go
around them), and patching ``Tensor.backward`` (``torch.autograd.backward`` goes around it).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lockstep import reduction_context
from lockstep._torch_compat import version_of
from lockstep.errors import WrongUseError
from lockstep.sync import guard, round_checks
from lockstep.sync.bucket_assignment import BucketAssignment, ReducerFactory
from lockstep.sync.ordered_reducer import OrderedReducer
from lockstep.sync.reducer import WEIGHTED, Contribution, Reducer
from lockstep.sync.replica_checks import check_options, compare_structures
from lockstep.sync.synced_tensors import find_synced_tensors
from lockstep.sync.tensor_broadcast import broadcast_tensors
from lockstep.sync.window_weights import Units, WindowWeights
from lockstep.sync.windowed_sync import WindowedSync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lockstep.group import Group
    from lockstep.sync.buckets import Slot, Sums
    from lockstep.sync.shard_tree_sum import ShardOrder


class GradientSync(WindowedSync):
    """The N gradients of some modules become one. Made by `replicate`.

    With ``averages=False`` the losses are sums over their batches: the gradients are added and
    not divided, and of a weight only its being zero or not matters.
    `making` says how buckets are summed, where it is not by one all-reduce each.

    Attributes:
        rounds: how many reductions there have been.
        full_round: the last one after which every parameter had a gradient.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        group: Group,
        *,
        bucket_cap_mb: float = 25,
        broadcast: bool = True,
        buffers: str = "after_backward",
        owns_group: bool = False,
        averages: bool = True,
        order: ShardOrder | None = None,
        making: Callable[[int, int, bool, ShardOrder | None], ReducerFactory] = ReducerFactory,
    ) -> None:
        check_options(buffers, bucket_cap_mb)
        found = find_synced_tensors(modules)
        guard.refuse_attached(found.parameters, "detach() the GradientSync that has it")
        self._cap_bytes = int(bucket_cap_mb * 2**20)
        compare_structures(group, found, [self._cap_bytes, buffers, averages])
        self._order = order
        self._taken_weight = 0.0
        self._last_shard: int | None = None
        units = _units(group, order, averages=averages)
        super().__init__(modules, group, found, units, averages=averages)
        self._owns_group = owns_group
        self._syncs_buffers = buffers == "after_backward"
        if broadcast:
            params = [slot.param for slot in self._slots]
            broadcast_tensors(group, params, cap_bytes=self._cap_bytes)
            self._buffers.broadcast(group, cap_bytes=self._cap_bytes)
        self._unread: round_checks.Unread | None = None
        how = making(self._cap_bytes, found.signature(), averages, order)
        self._assignment = BucketAssignment(self._slots, group, how)
        self._hook_parameters(arrivals=self._reducer.can_overlap or not self._assignment.is_whole)
        guard.protect(self, self._slots)

    # ------------------------------------------------------------------ for users

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, **backward_kwargs: Any
    ) -> None:
        """Run backward and reduce; on return the gradients are the global ones.

        Args:
            loss: what to differentiate; a scalar, or with ``gradient=`` of any shape.
            weight: what the loss counts for (samples, tokens) if it is a mean over them.
                Zero: what it uses has gradient zero (and not None), even if the loss is NaN; of
                a borrowed batch (`set_delivered_weight` said 0) nothing counts. None: as a
                plain ``loss.backward()``, one per rank or what `set_delivered_weight` said.
            backward_kwargs: for ``Tensor.backward`` (``gradient``, ``retain_graph``, ...).

        Gradient:
            sum over ranks and window of weight * d loss / sum of weights, added to what
            earlier rounds left. Under `no_sync`: nothing is reduced yet.

        Collective:
            Every rank. One all-reduce per bucket, overlapping backward, and a broadcast of the
            buffers.

        Raises:
            WeightError: a bad weight (before anything else), or weights that add up to zero.
            MixedWeightsError: weighted and plain backwards in one window.
            SparseGradientError: on every rank, if any rank got one.
            PeerLostError: another rank went away.
        """
        self._backward(loss, weight, backward_kwargs)

    def reduce_pending(self) -> None:
        """Take part in the round that the peers run, with what is there, or with nothing.

        For a rank that has nothing (left) to run backward through, and to close a window of
        `no_sync` backwards.

        Gradient:
            As after a backward. If no rank brings anything, gradients stay as they are.

        Collective:
            Every rank: the same calls as for one synchronised backward.

        Raises:
            PeerLostError: another rank went away.
        """
        self.attached()
        self._settle()
        self._check_left_gradients()
        if self._window.kind is None:
            self._keep_earlier()
        self._begin_round()
        self._end_round()

    def forget_window(self) -> None:
        """Drop the gradients since the last round. Every rank does, or none; no collective."""
        _put_grads(dict.fromkeys(self._slots))
        self._reset()

    def take_shard(self, shard: int) -> None:
        """With a shard order: the backwards since the last call were those of `shard`.

        Gradient:
            Leaves ``parameter.grad`` until `reduce_pending` adds up all shards in order.

        Collective:
            None.
        """
        assert isinstance(self._reducer, OrderedReducer), "made without a shard order"
        self._reducer.take_shard(shard, self._window.weight - self._taken_weight)
        self._taken_weight = self._window.weight
        self._leave_window_open()

    @contextmanager
    def last_shard(self, shard: int) -> Iterator[None]:
        """With a shard order: the backward inside is that of `shard`, and ends the step's shards.

        Gradient:
            After it, those of all shards, added up in order.

        Collective:
            Those of a synchronised backward.
        """
        self._last_shard = shard
        try:
            yield
        finally:
            self._last_shard = None

    def broadcast_buffers(self) -> None:
        """Overwrite every rank's buffers with rank 0's.

        Gradient:
            None: buffers have none.

        Collective:
            Every rank. Blocks. One broadcast.
        """
        self._buffers.broadcast(self.attached(), cap_bytes=self._cap_bytes)

    def detach(self) -> None:
        """Take the hooks off and forget the group. Gradients stay, as plain tensors.

        Works after a failure as well. Idempotent; other calls raise afterwards.
        """
        if self._group is None:
            return
        reduction_context.deliver(None)
        self._unhook_parameters()
        self._late.release()
        self._reducer.close()
        self._reset()
        if self._owns_group:
            # An exception's frames may keep the handle alive; it must not keep the sockets.
            self._group.close()
        self._group = None
        self._unread = None
        guard.release(self, self._slots)

    def part(self) -> bool:
        """See `Synchroniser`: buckets and hooks are made again, for another set of ranks."""
        self.detach()
        return False

    def join(self, group: Group) -> None:
        """See `Synchroniser`; never after a `part` that said no.

        Collective:
            None.
        """
        raise WrongUseError("this synchronisation was detached", fix="make another one")

    @property
    def _reducer(self) -> Reducer:
        return self._assignment.reducer

    def _begin_plain(self) -> None:
        self._at_end(lambda: self._end_round() if self._is_open else None)
        self._begin_round()

    def _unit(self, kind: str) -> float:
        self._settle()
        return self._units[kind]

    # ------------------------------------------------------------------ rounds

    def _open_window(self, kind: str) -> None:
        self.attached()
        self._settle()
        if self._order is not None:
            self._check_in_order()
        super()._open_window(kind)

    def _check_in_order(self) -> None:
        if not self._is_paused and self._last_shard is None:
            raise round_checks.out_of_order(self.place)
        # Unfrozen since the layout was made: every worker runs the same operator.
        if self._window.kind is None and self._assignment.has_unfrozen:
            self._assignment.admit_unfrozen(self.attached())

    def _drive(self, run: Callable[[], None], weight: float | None) -> None:
        """Run a backward of our own; the round begins before it and ends after it."""
        muted = weight == 0.0
        self._is_running = True
        kept: dict[Slot, torch.Tensor | None] = {}
        try:
            if muted:
                # Weight zero: no value of it may stay, and zero times NaN would.
                kept = {slot: slot.param.grad for slot in self._slots}
                _put_grads(dict.fromkeys(kept))
                self._arrive = None
            elif not self._is_paused:
                self._begin_round()
            with reduction_context.backward_of(self.attached(), weight, self._window.aside_by_id):
                run()
        except BaseException:
            if muted:
                _put_grads(kept)
            self._fail()
            raise
        finally:
            self._is_running = False
        if muted:
            _put_grads(self._with_zeros(kept))
            kept.clear()
        if muted and not self._is_paused:
            self._begin_round()
        if self._is_paused:
            self._leave_window_open()
        else:
            self._end_round()

    def _with_zeros(self, kept: dict[Slot, torch.Tensor | None]) -> dict[Slot, torch.Tensor | None]:
        """After a backward of weight zero: what it used has a gradient, unless it was borrowed."""
        if self.is_borrowed:
            return kept
        return {
            slot: torch.zeros_like(slot.param)
            if before is None and slot.param.grad is not None
            else before
            for slot, before in kept.items()
        }

    def _begin_round(self) -> None:
        contribution = self._window.contribution(self._units)
        contribution.thaws = self._assignment.has_unfrozen
        self._reducer.start(contribution, self._step)
        if self._last_shard is not None and isinstance(self._reducer, OrderedReducer):
            weight = self._window.weight - self._taken_weight
            self._reducer.end_with(self._last_shard, weight)
        self._is_open = True
        self._arrive = self._assignment.listener()

    def _end_round(self) -> None:
        window, contribution = self._window, self._reducer.contribution
        if window.kind == WEIGHTED:
            contribution.weight = window.weight
        self._arrive = None
        unknown = self._late.with_gradient()
        if unknown:
            contribution.faults.append({"kind": "unknown", "names": unknown})
        try:
            sums = self._reducer.finish()
            used_all = self._reducer.used_all() and self._assignment.is_whole
            thawed: tuple[Sums, Contribution] | None = None
            if contribution.thaws or (sums is not None and sums.thaws):
                thawed = self._assignment.thaw(self.attached(), contribution)
            self._assignment.finish_learning()
        except BaseException:
            self._is_broken = True
            raise
        finally:
            self._reset()
        if self._syncs_buffers:
            self.broadcast_buffers()
        try:
            # Refusals last: every rank has made the same calls by now, and can go on.
            self._judge_round(sums, contribution)
            if thawed is not None:
                self._judge(*thawed)
        except BaseException:
            self._put_back_earlier(window)
            raise
        if sums is None or sums.plain + sums.weighted:
            self._note_round(used_all)
        else:
            self.rounds += bool(window.aside)  # the ranks have compared what earlier rounds left
        if window.aside or self._hooked or self._captures.are_fresh:
            self._complete(window, is_round=True)

    def _judge_round(self, sums: Sums | None, mine: Contribution) -> None:
        if sums is None:
            self._unread = round_checks.Unread(self._reducer.layout.sums_on_device, mine)
        else:
            self._judge(sums, mine)

    def _accept_changes(self) -> None:
        for bucket in self._reducer.layout.buckets:
            bucket.delivered_version = version_of(bucket.flat)
            for slot in bucket.kept:
                slot.accept_changes()
        for slot in self._accumulated:
            slot.accept_changes()

    def _judge(self, sums: Sums, mine: Contribution) -> None:
        group = self.attached()
        self._is_broken = round_checks.is_out_of_step(sums, mine, group)
        round_checks.judge(sums, mine, group, together=self._reducer.reads_are_free)
        self._units.learn(sums)

    def _note_round(self, used_all: bool) -> None:
        self.rounds += 1
        if used_all:
            self.full_round = self.rounds
        else:
            for slot in [slot for slot in self._slots if slot.param.grad is not None]:
                slot.passed = self.rounds

    def _settle(self) -> None:
        """Look at sums that were left on the accelerator so that the host need not wait."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._judge(unread.read(), unread.contribution)

    def _reset(self) -> None:
        # Peers wait for the buckets that did not follow, or have taken them for others.
        self._is_broken = self._is_broken or self._reducer.has_launched
        self._reducer.abandon()
        self._window = WindowWeights()
        self._taken_weight = 0.0
        self._tasks.clear()
        self._is_open = False
        self._is_running = False
        self._has_failed = False
        self._arrive = None


def _units(group: Group, order: ShardOrder | None, *, averages: bool) -> Units:
    if not averages:
        return Units(1, fixed=True)
    # In a fixed order of shards nothing may follow the ranks.
    return Units(group.size) if order is None else Units(order.num_shards, learns=False)


def _put_grads(grads: dict[Slot, torch.Tensor | None]) -> None:
    for slot, grad in grads.items():
        slot.param.grad = grad
