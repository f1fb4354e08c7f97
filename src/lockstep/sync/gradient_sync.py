# SPDX-License-Identifier: Apache-2.0
"""`GradientSync` and `replicate`: synchronised gradients without a wrapper around the model.

`GradientSync` is the surface for programs. Behind it `ReductionRounds` defines the global gradient,
a `Transport` moves numbers between the ranks, and hooks on the parameters notice every backward,
whichever method of the model computed the loss, or none: when ``backward`` returns, the gradients
are the global ones.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lockstep.errors import ConfigurationError, WrongUseError
from lockstep.group import Group, resolve_group
from lockstep.sync import optimizer_guard
from lockstep.sync.bucket_transport import BucketTransport
from lockstep.sync.buffer_broadcast import BufferBroadcast
from lockstep.sync.reduction_rounds import ReductionRounds
from lockstep.sync.replica_checks import compare_structures, compare_values
from lockstep.sync.round_contribution import RoundDigest
from lockstep.sync.synced_tensors import as_modules, find_synced_tensors, refuse_scripted
from lockstep.sync.tensor_broadcast import broadcast_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from lockstep.errors import WeightError
    from lockstep.sync.ordered_reducer import ShardGradient
    from lockstep.sync.shard_tree_sum import ShardOrder
    from lockstep.sync.transport_protocol import TransportFactory


def replicate(
    model: Any,
    *,
    group: Any = None,
    bucket_cap_mb: float = 25,
    broadcast: bool = True,
    buffers: str = "after_backward",
) -> GradientSync:
    """Synchronise the gradients of a model on every rank. The model is not wrapped.

    Args:
        model: a module, or a sequence of modules that are trained together (several models, a
            criterion with parameters). Modules that one backward goes through belong in one call.
        group: a `Group`, a process group, or None for the world group (a rank alone, where
            none is initialised).
        bucket_cap_mb: the most that travels in one all-reduce, in MiB.
        broadcast: start from rank 0's parameters and buffers. False: the ranks' values are
            left as they are; structures are compared all the same.
        buffers: "after_backward": rank 0's buffers are broadcast after each synchronised
            backward; "manual": when `GradientSync.broadcast_buffers` is called.

    Returns:
        The sync, for its ``backward``, ``no_sync`` and ``detach``. Hooks on parameters hold it.

    Gradient:
        After each backward outside ``no_sync``: the mean over ranks, or by weights.

    Collective:
        Every rank. Blocks. One small all-gather (more where the models differ), then broadcasts.

    Raises:
        ReplicasDifferError: the ranks' models differ; raised on all before any payload moves.
        WrongTypeError: not a module, one of TorchScript, or with parameters of DDP, FSDP, DTensor.
        ConfigurationError: a parameter is synchronised already, or is on a device for which the
            process group has no backend.
        PeerLostError: another rank went away.
    """
    return GradientSync(
        as_modules(model),
        resolve_group(group),
        bucket_cap_mb=bucket_cap_mb,
        broadcast=broadcast,
        buffers=buffers,
        owns_group=not isinstance(group, Group),
    )


class GradientSync:
    """Reduces the N gradients of some modules to one; the base class of the other syncs.

    `replicate` makes one. With ``averages=False`` the losses are sums over their batches: the
    gradients are added and not divided, and a weight of 0 leaves a batch out. Under an `order` the
    gradients are those of shards, which are added up in a fixed order. `make_transport` says how
    gradients travel where that is not in buckets with one all-reduce each, and `settings` what
    else the ranks have to agree on.
    """

    communicates_in_forward: ClassVar[bool] = False
    """Whether every rank has to run the same forwards, because weights are gathered for them."""

    units: Sequence[str] = ()
    """The parts of the models that are gathered and freed together, by name; none if whole."""

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
        make_transport: TransportFactory | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        _check_options(buffers, bucket_cap_mb)
        refuse_scripted(modules)
        self._found = find_synced_tensors(modules)
        fix = "gradients.detach() of that GradientSync; of a TorchTrainer's: trainer.shutdown()"
        optimizer_guard.refuse_attached(self._found.parameters, fix)
        self._cap_bytes = int(bucket_cap_mb * 2**20)
        own = {"bucket_cap_mb": bucket_cap_mb, "buffers": buffers, "averages": averages}
        self._settings = {**own, **(settings or {})}
        number = compare_structures(group, self._found, self._settings)
        self._owns_group = owns_group
        self._buffers = BufferBroadcast(self._found.buffers.values())
        parameters = list(self._found.parameters.values())
        if broadcast:
            broadcast_tensors(group, parameters, cap_bytes=self._cap_bytes)
            self._buffers.broadcast(group, cap_bytes=self._cap_bytes)
        self._prepare(group)
        self._rounds = ReductionRounds(
            modules,
            group,
            self._found,
            make_transport or partial(BucketTransport, order=order),
            cap_bytes=self._cap_bytes,
            averages=averages,
            num_shards=None if order is None else order.num_shards,
            after_round=self.broadcast_buffers if buffers == "after_backward" else None,
        )
        # A trainer compares the weights itself, and a worker that joins later has no first round.
        compared = (parameters, self._rounds.late.take_buffers) if owns_group else ()
        self._rounds.digest = RoundDigest(group.size, number, *compared)
        optimizer_guard.protect(self._rounds)

    def _prepare(self, group: Group) -> None:
        """Called when all ranks hold the same values, before there are hooks on parameters."""

    # ------------------------------------------------------------------ gradients

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, **backward_kwargs: Any
    ) -> None:
        """Run backward and reduce; on return the gradients are the global ones.

        Args:
            loss: what to differentiate; a scalar, or with ``gradient=`` of any shape.
            weight: what the loss counts for (samples, tokens) if it is a mean over them.
                0: the parameters that it uses get gradient zero (and not None), even if the loss
                is NaN. None: as a plain ``loss.backward()``: 1, or what `set_delivered_weight`
                said. On a borrowed batch (a rank without samples in this step computes on another
                rank's batch, so that it takes part in the collectives) the weight is ignored.
            backward_kwargs: for ``Tensor.backward`` (``gradient``, ``retain_graph``, ...).

        Gradient:
            sum over ranks and window of weight * d loss / sum of weights, added to what
            earlier rounds left. Under `no_sync`: nothing is reduced yet.

        Collective:
            Every rank. One all-reduce per bucket, and a broadcast of the buffers. The all-reduces
            overlap backward, unless other collectives of the group run inside it.

        Raises:
            WeightError: a bad weight (before anything else), or weights that add up to zero.
            MixedWeightsError: weighted and plain backwards in one window.
            SparseGradientError: on every rank, if any rank got one.
            PeerLostError: another rank went away.
        """
        self._rounds.backward(loss, weight, backward_kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate on this rank; the next backward outside closes the window.

        Gradient:
            Weighted backwards of the window are divided once by all their weights; plain ones
            add up, as in torch.

        Collective:
            None inside the block.
        """
        return self._rounds.no_sync()

    def reduce_pending(self) -> None:
        """Take part in the round that the peers run, with the window's gradients or with none.

        For a rank that has nothing (left) to run backward through, and to close a window of
        `no_sync` backwards.

        Gradient:
            As after a backward. If no rank brings anything, gradients stay as they are.

        Collective:
            Every rank: the same calls as for one synchronised backward.

        Raises:
            PeerLostError: another rank went away.
        """
        self._rounds.reduce_pending()

    def forget_window(self) -> None:
        """Drop the gradients since the last round. Every rank does, or none; no collective."""
        self._rounds.forget_window()

    def keep_window(self) -> None:
        """Before code that is to know nothing of an open window: hide the window's gradients.

        ``zero_grad`` finds none, and does not give the window up. Gradients that the program has
        zeroed or changed since the last backward are refused on all ranks.

        Gradient:
            None in ``parameter.grad``, until the window's next backward or `reduce_pending`.

        Collective:
            None.
        """
        self._rounds.keep_window()

    def take_shard(self, shard: int) -> None:
        """With a shard order: the backwards since the last call were those of `shard`.

        Gradient:
            Leaves ``parameter.grad`` until `reduce_pending` adds up all shards in order.

        Collective:
            None.
        """
        self.add_shard(shard, self.pack_shard())

    def pack_shard(self) -> ShardGradient:
        """With a shard order: take out the gradient of one shard's backwards under `no_sync`.

        Gradient:
            Leaves ``parameter.grad``; `add_shard` brings it to those of the other shards.

        Collective:
            None.
        """
        return self._rounds.pack_shard()

    def add_shard(self, shard: int, gradient: ShardGradient) -> None:
        """With a shard order: `gradient` is that of `shard`, or one more of its window.

        Gradient:
            Waits until `reduce_pending` or a `last_shard` adds up all shards in order.

        Collective:
            None.
        """
        self._rounds.transport.ordered_reducer.add_shard(shard, gradient)

    def set_shard_order(self, order: ShardOrder) -> None:
        """With a shard order: the gradients are those of other shards from now on.

        Gradient:
            Those of an open window are dropped.

        Collective:
            None, and every rank between the same two steps.
        """
        rounds = self._rounds
        if rounds.listener.is_listening:
            rounds.num_shards = order.num_shards
            rounds.join(rounds.attached_group())
            rounds.transport.set_order(order)

    def bits_of(self, gradient: ShardGradient) -> dict[str, int]:
        """For each parameter, by name, a hash of the bits of its gradient in a shard's."""
        return self._rounds.transport.ordered_reducer.bits_of(gradient)

    def outside_window(self) -> AbstractContextManager[None]:
        """With a shard order: backwards inside are no part of the window, nor is their weight.

        They have to be under `no_sync`, and their gradient to be taken out by `pack_shard`.
        """
        return self._rounds.outside_window()

    def last_shard(self, shard: int) -> AbstractContextManager[None]:
        """With a shard order: the backward inside is that of `shard`, and ends the step's shards.

        Gradient:
            After it, those of all shards, added up in order.

        Collective:
            Those of a synchronised backward.
        """
        return self._rounds.transport.last_shard(shard)

    @property
    def rounds(self) -> int:
        """The number of reductions so far."""
        return self._rounds.num_rounds

    @property
    def progress(self) -> int:
        """Another number after each reduction and each backward, those under `no_sync` as well."""
        return self._rounds.num_rounds + self._rounds.weights.num_backwards

    @property
    def has_open_window(self) -> bool:
        """Whether gradients have arrived since the last round."""
        return self._rounds.has_open_window

    @property
    def needs_guard(self) -> bool:
        """Whether there are peers, so that a local gradient is not the global one."""
        return self._rounds.needs_guard

    def watch_gradients(self) -> None:
        """From now on, `has_added` says whether a backward has added to gradients of before.

        Gradients of later rounds do not count, nor those that the program has cleared or zeroed.
        """
        self._rounds.watch_gradients()

    @property
    def has_added(self) -> bool:
        """See `watch_gradients`."""
        return self._rounds.has_added

    # ------------------------------------------------------------------ batches and steps

    def expect_weight(self, total: float | None) -> None:
        """Say what the batches of all ranks weigh together in a usual step, the same on every rank.

        Gradients of a step with that weight need no division; their values do not depend on it.
        """
        self._rounds.weights.set_expected_total(total)

    def set_delivered_weight(self, weight: float | WeightError | None) -> None:
        """Say what the batch of the next plain ``loss.backward()`` counts for.

        Args:
            weight: samples or tokens; None: one per rank (torch's mean over ranks); an error:
                to raise from the next backward without an explicit weight, on this rank alone,
                before it communicates.

        Gradient:
            Applied in the buckets, at the reduction. After weight 0, backwards leave the gradients
            of `lockstep.local` parameters as they are, until the next step or weight.

        Collective:
            None.

        Raises:
            WeightError: negative, NaN or infinite.
        """
        self._rounds.weights.deliver(weight)
        self._rounds.local.begin_batch(is_borrowed=self._rounds.weights.is_borrowed)

    def begin_step(self, step: int) -> None:
        """Say which optimizer step the backwards from now on belong to; the same on every rank.

        Gradient:
            A round of ranks at different steps, or after steps of other optimizers, is refused.

        Collective:
            None.
        """
        self._rounds.local.begin_batch(is_borrowed=False)  # a validation's last may have been
        self._rounds.begin_step(step)

    def set_undo_point(self, step: int | None) -> None:
        """Say where an interruption from now on leads back to; each rank keeps a state for that.

        Args:
            step: steps of the run that had happened; None: the present step stays.
        """

    def has_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` steps in another process, which also takes back its steps."""
        return False

    # ------------------------------------------------------------------ values and the group

    def broadcast_buffers(self) -> None:
        """Overwrite every rank's buffers with rank 0's.

        Gradient:
            None: buffers have none.

        Collective:
            Every rank. Blocks. One broadcast.
        """
        self._buffers.broadcast(self._rounds.attached_group(), cap_bytes=self._cap_bytes)

    def broadcast_weights(
        self, written: Sequence[torch.Tensor], *, has_written: bool
    ) -> list[torch.Tensor]:
        """Overwrite weights that forwards have written with those of a rank that ran a forward.

        Args:
            written: the weights that forwards write, as far as this rank knows.
            has_written: this rank has run the forwards of this batch.

        Returns:
            The weights that any rank has named.

        Gradient:
            None: runs without recording.

        Collective:
            Every rank. Blocks. One exchange, and broadcasts of the weights.

        Raises:
            PeerLostError: another rank went away.
        """
        group, slots = self._rounds.attached_group(), self._rounds.slots
        mine = {id(weight) for weight in written}
        named = [slot.number for slot in slots if id(slot.param) in mine]
        told = group.exchange([has_written, named])
        numbers = {number for _, theirs in told for number in theirs}
        weights = [slot.param for slot in slots if slot.number in numbers]
        source = next((rank for rank, (has_run, _) in enumerate(told) if has_run), 0)
        if weights:
            broadcast_tensors(group, weights, cap_bytes=self._cap_bytes, source=source)
            torch.autograd.graph.increment_version(weights)  # a broadcast raises no counter
        return weights

    def agree_on_values(self) -> None:
        """Refuse to go on if the parameters differ between ranks.

        Gradient:
            None: metadata only.

        Collective:
            Every rank. Two small all-gathers.

        Raises:
            ReplicasDifferError: on every rank; names the parameters and the ranks.
        """
        rounds = self._rounds
        params: dict[str, torch.Tensor] = {slot.name: slot.param for slot in rounds.slots}
        compare_values(rounds.attached_group(), params, have_stepped=rounds.steps_taken > 0)

    def leave_group(self) -> bool:
        """Leave a group that has broken.

        Returns:
            Whether the sync can `join_group`, which depends on the transport. Otherwise
            it is detached, and a new one has to be made.
        """
        can_rejoin = self._rounds.listener.is_listening and self._rounds.transport.can_rejoin
        if can_rejoin:
            self._rounds.leave()
        else:
            self.detach()
        return can_rejoin

    def join_group(self, group: Group) -> None:
        """Belong to `group`, whose ranks hold the same values, after `leave_group` returned True.

        Gradient:
            None: gradients of an open window are dropped.

        Collective:
            Every rank of `group`. One small all-gather.

        Raises:
            ReplicasDifferError: the ranks' models differ.
        """
        if not self._rounds.listener.is_listening:
            raise WrongUseError("this synchronisation was detached", fix="make another one")
        number = compare_structures(group, self._found, self._settings)
        # The shapes of now: a forward may have given them others, which not all ranks have seen.
        self._buffers = BufferBroadcast(self._found.buffers.values())
        self._rounds.join(group)
        self._rounds.digest = RoundDigest(group.size, number)

    def detach(self) -> None:
        """Take the hooks off and forget the group. Gradients stay, as plain tensors.

        Works after a failure as well. Idempotent; other calls raise afterwards.
        """
        if not self._rounds.listener.is_listening:
            return
        group = self._rounds.detach()
        optimizer_guard.release(self._rounds)
        if self._owns_group and group is not None:
            # An exception's frames may keep the handle alive; it must not keep the sockets.
            group.close()


def _check_options(buffers: str, bucket_cap_mb: float) -> None:
    if buffers not in ("after_backward", "manual") or not bucket_cap_mb > 0:
        raise ConfigurationError(
            "buffers is 'after_backward' or 'manual', bucket_cap_mb is above zero",
            got=f"buffers={buffers!r}, bucket_cap_mb={bucket_cap_mb!r}",
        )
