# SPDX-License-Identifier: Apache-2.0
"""`Group`: an explicit handle on the ranks that work together. Nothing reads the default group.

Two rules make it possible to leave a broken group and to form a new one in the same process:

- The process group has exactly one owner, the `Group`. Sockets close, and peers that wait
  learn of a failure, only when the last reference is gone; an exception keeps the frames it
  passed through alive. So no frame below holds the process group or a torch ``Work`` in a
  local variable when it raises, and `close` drops the one reference there is.
- Whatever goes wrong inside a collective becomes `PeerLostError` with the original as its cause
  (gloo's plain ``RuntimeError`` looks like a bug), and a tensor on a device without a backend a
  `ConfigurationError`.
"""

from __future__ import annotations

import json
import math
import struct
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from lockstep._torch_compat import ALL_GATHER_ONE, REDUCE_SCATTER_ONE
from lockstep.all_gather_sum import AllGatherSum, is_faster_by_all_gather
from lockstep.group_errors import (
    closed_error,
    given_up_error,
    missing_ranks_error,
    no_backend_error,
    peer_lost_error,
    step_after_failure_error,
)
from lockstep.hierarchical_sum import LEAST_BYTES, HierarchicalAllReduce, HostGrid
from lockstep.pending_collective import Pending
from lockstep.phases import Phase, in_phase
from lockstep.process_group_argument import default_process_group, require_process_group
from lockstep.process_group_backend import (
    StartedCollectives,
    abort_nccl,
    call_watcher,
    has_backend_for,
    metadata_device,
    receive_from_all,
    watch,
)
from lockstep.tensor_stash import TensorStash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.errors import PeerLostError

SUM = dist.ReduceOp.SUM
MAX = dist.ReduceOp.MAX

MONITORED_TIMEOUT_S: Final = 300.0
"""Usual limit of `Group.monitored_all_gather`; less if the group's own timeout is shorter."""

_AWAITED: Final = {
    "backward": "the backward of a collective",
    "step": "a step of an optimizer, before which what autograd.grad was used for is compared",
    "filled step": "a step of an optimizer, with gradients that every rank has to fill in alike",
    "backward or step": "a backward, or to a step of an optimizer that is sharded",
}

_LENGTH: Final = struct.Struct("<q")

_ENVELOPE: Final = 504
"""Bytes of an exchanged value that are sent in one message with its length (a multiple of 8)."""

_DONE = Pending()


class Group:
    """The ranks that work together, and the few collectives that lockstep needs.

    ``Group(None)`` is a rank alone: every call works and communicates nothing.

    Args:
        process_group: a registered ``ProcessGroup`` or a raw backend such as
            ``ProcessGroupGloo``. The group becomes its owner for the purpose of `close`.
        device: where metadata travels; by default the CPU, or the current CUDA device if the
            process group cannot carry CPU tensors (NCCL).
        can_be_given_up: False where nobody calls `give_up`; then `confirm` waits for nothing.
        is_assumed: the rank is alone because there was no world group, and may get peers.

    Attributes:
        started: how many collectives this rank has started over the process group.
    """

    def __init__(
        self,
        process_group: Any | None,
        device: torch.device | None = None,
        *,
        can_be_given_up: bool = True,
        is_assumed: bool = False,
    ) -> None:
        self._process_group = process_group
        self._can_be_given_up = can_be_given_up
        self.is_assumed = is_assumed
        self._closed = False
        self._is_given_up = self._has_failed = False
        self._unconfirmed_on: torch.device | None = None
        self._over_hosts: HierarchicalAllReduce | None = None
        self.rank: int = 0 if process_group is None else process_group.rank()
        self.size: int = 1 if process_group is None else process_group.size()
        self.place = f"rank {self.rank} of {self.size}"  # as errors say where
        self.device = device or metadata_device(process_group)
        self.started = StartedCollectives(process_group, self.device)

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}{', closed' if self._closed else ''})"

    @property
    def is_alone(self) -> bool:
        """Whether the group is a rank alone, without a process group: nothing is communicated."""
        return self._process_group is None and not self._closed

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def use_hosts(self, hosts: Sequence[str], least_bytes: int = LEAST_BYTES) -> None:
        """From now on, sum large CPU tensors within each host before they cross to others.

        Args:
            hosts: by rank, `host_id` of each; the same argument on every rank. Where hosts have
                different numbers of ranks, or one each, sums go by the backend's all-reduce.
            least_bytes: the size of a large tensor; the same on every rank.
        """
        grid = HostGrid.of(hosts)
        if grid is not None and self._over_hosts is None:
            shared = HierarchicalAllReduce.of
            self._over_hosts = shared(self._process_group, grid, self.rank, least_bytes)
            self.started.over_hosts = self._over_hosts

    def all_reduce(self, tensor: torch.Tensor, op: Any = SUM) -> Pending:
        """Start to reduce `tensor` in place over all ranks.

        Args:
            tensor: contiguous, of the same shape and dtype on every rank.
            op: a ``torch.distributed.ReduceOp``.

        Returns:
            The collective in flight; call its `wait` before reading `tensor`.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank, same order. Does not block. One all-reduce; for few numbers on few ranks'
            CPUs one all-gather; for a large tensor on several hosts' messages (`use_hosts`).

        Raises:
            PeerLostError: the group is closed, or the collective could not be started.
        """
        if self._is_local_only("all_reduce"):
            return _DONE
        if op is SUM and self._over_hosts is not None and self._over_hosts.takes(tensor):
            work = self._over_hosts.start(self._process_group, tensor)
            return Pending(work, "all_reduce", self, tensor.device)
        if op is SUM and is_faster_by_all_gather(tensor, self.size):
            parts = tensor.new_empty(self.size * tensor.numel())
            pending = self._start("all_reduce", ALL_GATHER_ONE, parts, tensor)
            return pending.then(partial(AllGatherSum, parts=parts, total=tensor))
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._start("all_reduce", "allreduce", [tensor], options)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank with rank `source`'s.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank, same order. Blocks. One broadcast.

        Raises:
            PeerLostError: another rank went away or the group is closed.
        """
        if self._is_local_only("broadcast"):
            return
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        self._start("broadcast", "broadcast", [tensor], options).wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor`, by rank. Shapes and dtypes must agree.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank, same order. Blocks. One all-gather.

        Raises:
            PeerLostError: another rank went away or the group is closed.
        """
        if self._is_local_only("all_gather"):
            return [tensor.clone()]
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self.all_gather_into(gathered.view(-1), tensor.contiguous().view(-1))
        return list(gathered)

    def all_gather_into(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill `gathered` with every rank's `tensor`, one after the other along dimension 0.

        Args:
            gathered: contiguous; its length is the group's size times `tensor`'s.
            tensor: contiguous, of the same shape and dtype on every rank.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank, same order. Blocks. One all-gather.

        Raises:
            PeerLostError: another rank went away or the group is closed.
        """
        if self._is_local_only("all_gather"):
            gathered.copy_(tensor)
            return
        self._start("all_gather", ALL_GATHER_ONE, gathered, tensor).wait()

    def reduce(self, tensor: torch.Tensor, destination: int) -> Pending:
        """Start to sum `tensor` over all ranks on one of them, in place.

        Args:
            tensor: contiguous, of the same shape and dtype on every rank. Its
                result has a meaning on `destination` only.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank, same order. Does not block. One reduce.

        Raises:
            PeerLostError: the group is closed, or the collective could not be started.
        """
        if self._is_local_only("reduce"):
            return _DONE
        options: Any = dist.ReduceOptions()
        options.reduceOp = SUM
        options.rootRank = destination
        return self._start("reduce", "reduce", [tensor], options)

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Sum the ranks' `sent` and keep this rank's part of it, along dimension 0.

        Args:
            received: contiguous, of equal shape on every rank; overwritten.
            sent: contiguous; one part for each rank, by rank.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank, same order. Blocks. One reduce-scatter; on CPUs one all-to-all.

        Raises:
            PeerLostError: another rank went away or the group is closed.
        """
        if self._is_local_only("reduce_scatter"):
            received.copy_(sent)
            return
        if sent.device.type == "cpu":
            # gloo of torch 2.13 reduces all of `sent` to all ranks: twice the bytes.
            parts = sent.new_empty(self.size, *received.shape)
            counts = [len(received)] * self.size
            moved = parts.flatten(0, 1), sent, counts, counts, dist.AllToAllOptions()
            self._start("reduce_scatter", "alltoall_base", *moved).wait()
            torch.sum(parts, 0, out=received)
            return
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = SUM
        self._start("reduce_scatter", REDUCE_SCATTER_ONE, received, sent, options).wait()

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_rows: Sequence[int],
        sent_rows: Sequence[int],
    ) -> None:
        """Send rows of `sent` to every rank and fill `received` with the rows they send here.

        Args:
            received: rows by sending rank; contiguous.
            sent: rows by receiving rank; contiguous, of the same dtype and row size.
            received_rows: how many rows come from each rank.
            sent_rows: how many rows go to each rank.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank, same order. Blocks. One all-to-all.

        Raises:
            PeerLostError: another rank went away or the group is closed.
        """
        if self._is_local_only("all_to_all"):
            received.copy_(sent)
            return
        counts = list(received_rows), list(sent_rows)
        options = dist.AllToAllOptions()
        self._start("all_to_all", "alltoall_base", received, sent, *counts, options).wait()

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's small, JSON-able `value`, by rank; tuples come back as lists.

        Gradient:
            None: metadata only.

        Collective:
            Every rank, same order. Blocks. One small all-gather; another one where a value is
            longer than `_ENVELOPE` bytes.

        Raises:
            PeerLostError: another rank went away or the group is closed.
        """
        text = json.dumps(value).encode()
        # Most values are short: length and value travel in one message.
        message = _LENGTH.pack(len(text)) + text[:_ENVELOPE]
        messages = self._gather_bytes(message, _LENGTH.size + _ENVELOPE)
        lengths = [_LENGTH.unpack_from(message)[0] for message in messages]
        if max(lengths) <= _ENVELOPE:
            texts = [message[_LENGTH.size :] for message in messages]
        else:
            texts = self._gather_bytes(text, max(lengths))
        return [json.loads(one[:length]) for one, length in zip(texts, lengths, strict=True)]

    def _gather_bytes(self, mine: bytes, size: int) -> list[bytes]:
        """Every rank's bytes, by rank, each padded to `size`."""
        padded = torch.zeros(size, dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        gathered = torch.stack(self.all_gather(padded.to(self.device))).cpu()
        return [bytes(row) for row in gathered.numpy()]

    def monitored_all_gather(
        self, numbers: Sequence[float], before: str = "backward", max_s: float = MONITORED_TIMEOUT_S
    ) -> list[list[float]]:
        """Every rank's `numbers`, by rank; the error names the ranks that sent none.

        As torch's ``monitored_barrier``, for calls that one rank alone may leave out, such as a
        backward. Where metadata travels on the CPU, each rank receives a message from each other
        one, and so knows which are missing. NCCL's ranks run an all-gather with NCCL's timeout.

        Args:
            numbers: as many finite or infinite numbers on every rank, no NaN.
            before: the call that follows on every rank, a key of `_AWAITED`.
            max_s: the longest wait.

        Gradient:
            None: metadata only.

        Collective:
            Every rank, same order. Blocks, for `max_s` or the group's timeout.
            One small message to and from each rank, or one all-gather.

        Raises:
            PeerLostError: names the ranks that did not come. The group cannot be used any more.
        """
        if self._is_local_only("monitored_all_gather"):
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.device.type != "cpu":
            return [part.tolist() for part in self.all_gather(mine)]
        received = torch.full(
            (self.size, len(numbers)), math.nan, dtype=torch.float64, device="cpu"
        )
        received[self.rank] = mine
        with in_phase(Phase.WAITING):
            failure = receive_from_all(self._process_group, mine, received, max_s)
        if failure is None:
            return [part.tolist() for part in received]
        missing = [rank for rank in range(self.size) if received[rank].isnan().all()]
        self.note_failure()
        lost = missing_ranks_error(missing, before, _AWAITED[before], self.place, failure)
        raise lost from failure

    def watch(self, watcher: Callable[[], None]) -> None:
        """See `process_group_backend.watch`."""
        if self._process_group is not None:
            watch(self._process_group, watcher)

    def is_same_as(self, other: Group) -> bool:
        """Whether this object and `other` hold the same process group."""
        return self is other or (
            self._process_group is not None and self._process_group is other._process_group
        )

    def close(self) -> None:
        """Drop the process group; every later call raises `PeerLostError`. Idempotent."""
        self.started.freeze()
        self._process_group = self._over_hosts = None
        self._closed = True

    def give_up(self) -> None:
        """Abort the collectives that run and refuse all others: a peer is lost. From any thread."""
        assert self._can_be_given_up, "no step over this group waits for its collectives"
        # Set the flag before the abort: `confirm` must see it after any aborted collective.
        self._is_given_up = True
        abort_nccl(self._process_group)

    def confirm(self) -> None:
        """Make sure that the awaited collectives are complete, before a step uses their results.

        ``wait`` of a CUDA collective only orders the streams, and does not show that an abort ended
        the collective half-way. `give_up` sets its flag before the abort. So if the device has done
        all its work and the flag is not set afterwards, no abort had begun when the collectives
        ended, and each of them is complete. Without a collective since the last call, `confirm`
        does not wait for the device; nor over a group that nobody gives up.

        After a collective that has failed, or was refused, `confirm` refuses every step: a loop
        that has caught the error (``except RuntimeError``) lacks what the collective was to bring.

        Gradient:
            None: nothing is communicated.

        Collective:
            None. On CUDA it waits for this rank's device.

        Raises:
            PeerLostError: the group was given up meanwhile, or one of its collectives has failed.
        """
        if self._has_failed:
            self.refuse_if_given_up("a step")
            raise step_after_failure_error(self.place)
        if self._unconfirmed_on is None:
            return
        device, self._unconfirmed_on = self._unconfirmed_on, None
        if device.type == "cuda" and self._can_be_given_up:
            with in_phase(Phase.WAITING):
                torch.cuda.synchronize(device)
        self.refuse_if_given_up("a step")

    def note_failure(self) -> None:
        """Let `confirm` refuse from now on: the ranks lack what they were to send each other."""
        self._has_failed = True

    def lost_error(self, what: str, error: RuntimeError) -> PeerLostError:
        """The error for a failure inside `what`, a collective."""
        self.note_failure()
        return peer_lost_error(what, self.place, error)

    def note_waited(self, what: str, device: torch.device) -> None:
        """Note, for `confirm`, that a wait for `what`, a collective, has ended."""
        if self._unconfirmed_on is None or device.type == "cuda":
            self._unconfirmed_on = device
        self.refuse_if_given_up(what)

    def refuse_if_given_up(self, what: str) -> None:
        """Raise `PeerLostError` for `what` if a peer is lost."""
        if self._is_given_up:
            self.note_failure()
            raise given_up_error(what, self.place)

    def _is_local_only(self, what: str) -> bool:
        if self._closed:
            raise closed_error(what, self.place)
        self.refuse_if_given_up(what)
        if self._process_group is None:
            return True
        call_watcher(self._process_group)
        return False

    def _start(self, what: str, method: str, *arguments: Sequence[Any] | Any) -> Pending:
        stash = TensorStash(arguments)
        first = arguments[0] if isinstance(arguments[0], torch.Tensor) else arguments[0][0]
        try:
            # The first collective of a group connects the ranks.
            with in_phase(Phase.WAITING):
                work = getattr(self._process_group, method)(*arguments)
            return Pending(work, what, self, first.device, stash)
        except RuntimeError as error:
            if not has_backend_for(self._process_group, first.device):
                raise no_backend_error(what, self.place, first.device) from error
            raise self.lost_error(what, error) from error


def resolve_group(group: Any | Group | None = None) -> Group:
    """A `Group` from a user's argument: a group, a process group, or None for the world group.

    Without a world group, a process that was started alone is a rank alone.
    """
    if isinstance(group, Group):
        return group
    group = default_process_group() if group is None else group
    # Torch ends the process itself where a collective of NCCL's fails.
    return Group(require_process_group(group), can_be_given_up=False, is_assumed=group is None)
