# SPDX-License-Identifier: Apache-2.0
"""An all-reduce of a large CPU tensor over hosts that have several ranks each.

gloo's all-reduce is a ring: in each direction of a link between two hosts, N ranks send
2 (N - 1) / N times the tensor. Here the ranks of a host add up first, each a part of the tensor;
ranks with the same place on their hosts add up those sums; and each host's ranks hand them out. So
H hosts send 2 (H - 1) / H times the tensor: with two hosts of two ranks 2/3 of the ring's bytes,
with two hosts of many ranks half of them. All ranks together send as much as in the ring.

Invariants:

- One rank computes an element's sum, and the others receive its bits: all ranks have the same.
- A tensor is cut into pieces, which go through the stages one after the other, in the same order
  on every rank; so messages between two ranks pair up. The first piece is between the hosts while
  the second one is within them.
- Messages have tags of their own and pair with no collective: one of the program's own cannot meet
  them, whenever it runs. All groups over one process group share the threads, so that the sums of
  two syncs follow one another in the order in which the ranks start them.
- A thread holds the process group while a piece is on its way, and not between two of them: the
  sockets of a group that was left close as soon as nothing is on its way.

Rejected: a process group for the ranks of each host and one for those of each place (each would
have to be broken and left where a rank is lost, see docs/adr/0033); one exchange among all ranks
(the ring's bytes); leaders that alone send between the hosts (the same bytes, and the sums of a
host wait for one rank).
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

LEAST_BYTES: Final = 1 << 23
"""The size of a tensor from which on little is lost where the hosts' link is as fast as loopback.

A step with tensors of 6 MiB took 1.16 of a ring's there, with those of 16 MiB 1.07.
"""
_PIECE_BYTES: Final = 1 << 22
_STAGES: Final = 3
_TAGS: Final = (0x4C50, 0x4C51, 0x4C52, 0x4C53)
_AT_EXIT_S: Final = 5.0

_threads: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def host_id() -> str:
    """Equal on ranks that reach each other without a network: one machine, one network namespace.

    As NCCL, it is what the environment's NCCL_HOSTID says, where that is set.
    """
    given = os.environ.get("NCCL_HOSTID")
    if given:
        return given
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


@dataclass(frozen=True)
class HostGrid:
    """The ranks by host, where each of several hosts has equally many, more than one.

    Attributes:
        rows: the ranks of each host, in order.
    """

    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, hosts: Sequence[str]) -> HostGrid | None:
        """The grid of ranks whose hosts are `hosts`, by rank; None where there is none."""
        rows: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            rows.setdefault(host, []).append(rank)
        widths = {len(row) for row in rows.values()}
        if len(rows) < 2 or len(widths) > 1 or widths == {1}:
            return None
        return cls(tuple(map(tuple, rows.values())))


class HierarchicalAllReduce:
    """Sums tensors over the ranks of a `HostGrid`, in threads that end with this object.

    Args:
        grid: the ranks, the same on every one of them.
        rank: this rank.
        least_bytes: smaller tensors are left to the backend.
    """

    @classmethod
    def of(cls, process_group: Any, *arguments: Any) -> HierarchicalAllReduce:
        """The object that all groups over `process_group` have in common; made by the first."""
        # By the id: a group holds both until it closes, and a reference would keep sockets open.
        found = _by_process_group.get(id(process_group))
        if found is None:
            found = _by_process_group[id(process_group)] = cls(*arguments)
        return found

    def __init__(self, grid: HostGrid, rank: int, least_bytes: int = LEAST_BYTES) -> None:
        self._least_bytes = least_bytes
        self._messages = _Messages()
        self._place = _Place.of(grid, rank)
        self._queues: list[SimpleQueue[_Piece | None]] = [SimpleQueue() for _ in range(_STAGES)]
        self._has_threads = False
        self._num_sums = 0
        # The threads end when nothing is on its way any more; none of them holds this object.
        weakref.finalize(self, self._queues[0].put, None)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is large enough, and on the CPU."""
        return tensor.device.type == "cpu" and tensor.nbytes >= self._least_bytes

    def start(self, process_group: Any, tensor: torch.Tensor) -> PiecewiseSum:
        """Begin to sum `tensor` in place over all ranks.

        Args:
            process_group: of the ranks; held until the sum is complete, or has failed.
            tensor: contiguous, of the same shape and dtype on every rank.

        Returns:
            The sum on its way; has the ``wait`` of torch's ``Work``.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank, same order among these calls. Does not block. Messages to and from the
            ranks of this host, and those of this place on the other hosts.
        """
        if not self._has_threads:
            self._start_threads()
        self._num_sums += 1
        num_pieces = math.ceil(tensor.nbytes / _PIECE_BYTES)
        parts = tensor.detach().view(-1).tensor_split(num_pieces)
        pieces = [_Piece(process_group, part, self._place, self._messages) for part in parts]
        for piece in pieces:
            self._queues[0].put(piece)
        return PiecewiseSum(pieces, self._messages)

    def count_collectives(self, count: Callable[[], int]) -> int:
        """The backend's `count`, with one for each sum and none for its messages."""
        with self._messages.counting:
            return count() - self._messages.number + self._num_sums

    def _start_threads(self) -> None:
        self._has_threads = True
        following: list[SimpleQueue[_Piece | None] | None] = [*self._queues[1:], None]
        for stage, (queue, next_queue) in enumerate(zip(self._queues, following, strict=True)):
            thread = threading.Thread(
                target=_work,
                args=(stage, queue, next_queue),
                name=f"lockstep-all-reduce-{stage}",
                daemon=True,  # Python would wait for it before finalizers run at the process's end
            )
            _threads.add(thread)
            thread.start()


_by_process_group: Final[weakref.WeakValueDictionary[int, HierarchicalAllReduce]] = (
    weakref.WeakValueDictionary()
)


class PiecewiseSum:
    """A sum on its way, in pieces."""

    def __init__(self, pieces: Sequence[_Piece], messages: _Messages) -> None:
        self._pieces = pieces
        self._messages = messages

    def is_completed(self) -> bool:
        """Whether the tensor holds the sum, or will not."""
        return all(piece.is_done.is_set() for piece in self._pieces)

    def wait(self, timeout: timedelta) -> None:
        """Wait until the tensor holds the sum.

        Raises:
            RuntimeError: a peer went away, or did not come within the group's timeout; or `timeout`
                has passed, and `is_completed` is still False.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for piece in self._pieces:
            if not piece.is_done.wait(max(0.0, deadline - time.monotonic())):
                raise RuntimeError("the sum is not complete yet")
        error = self._messages.error
        if error is not None and not all(piece.is_complete for piece in self._pieces):
            raise error.with_traceback(None)


@dataclass(frozen=True)
class _Place:
    """A rank's place in a grid.

    Attributes:
        row: the ranks of its host.
        column: the ranks that have the same place on each host.
        local: its own place on its host.
        host: the number of its host.
    """

    row: tuple[int, ...]
    column: tuple[int, ...]
    local: int
    host: int

    @classmethod
    def of(cls, grid: HostGrid, rank: int) -> _Place:
        host = next(number for number, row in enumerate(grid.rows) if rank in row)
        row = grid.rows[host]
        local = row.index(rank)
        return cls(row, tuple(other[local] for other in grid.rows), local, host)


class _Messages:
    """Sends and receives parts of tensors.

    Attributes:
        counting: held while the backend counts messages, so that `number` agrees with it.
        number: how many messages the backend has counted.
        error: the first failure, after which nothing more is sent: peers hear of it when this
            rank leaves the group.
    """

    def __init__(self) -> None:
        self.counting = threading.Lock()
        self.number = 0
        self.error: Exception | None = None

    def exchange(
        self,
        process_group: Any,
        tag: int,
        sent: Iterable[tuple[int, torch.Tensor]],
        received: Iterable[tuple[int, torch.Tensor]],
    ) -> None:
        """Send tensors to ranks, fill others with what ranks send here, and wait for all of it."""
        works: list[Any] = []
        try:
            with self.counting:
                for rank, tensor in received:
                    works.append(process_group.recv([tensor], rank, tag))
                    self.number += 1
                for rank, tensor in sent:
                    works.append(process_group.send([tensor], rank, tag))
                    self.number += 1
            for work in works:
                work.wait()
        finally:
            works.clear()  # a traceback would keep them alive, and they the sockets


class _Piece:
    """A piece of a tensor on its way through the stages.

    Its elements are cut into a part for each place on a host, and each of those into a part for
    each host: the sum of part (place, host) is computed by that rank.

    Attributes:
        is_done: set when the sum is complete, or has failed.
        is_complete: the piece holds the sum.
    """

    def __init__(
        self, process_group: Any, flat: torch.Tensor, place: _Place, messages: _Messages
    ) -> None:
        self._process_group = process_group
        self._place = place
        self._messages = messages
        num_hosts = len(place.column)
        cells = flat.tensor_split(len(place.row) * num_hosts)
        bounds = [0]
        for cell in cells:
            bounds.append(bounds[-1] + cell.numel())
        # Of each place on a host the part, and of this rank's own the parts by host.
        self._parts = [
            flat[bounds[first] : bounds[first + num_hosts]]
            for first in range(0, len(cells), num_hosts)
        ]
        self._own = cells[place.local * num_hosts : (place.local + 1) * num_hosts]
        self.is_done = threading.Event()
        self.is_complete = False

    def run(self, stage: int) -> None:
        """Run a stage, unless one has failed; the last one lets go of the process group."""
        steps = (self._add_up_on_host, self._add_up_over_hosts, self._hand_out_on_host)
        try:
            if self._messages.error is None:
                with torch.no_grad():
                    steps[stage]()
                self.is_complete = stage == _STAGES - 1
        except Exception as error:  # whatever it was, `wait` raises it
            self._messages.error = self._messages.error or error.with_traceback(None)
        if stage == _STAGES - 1:
            self._process_group = None
            self.is_done.set()

    def _add_up_on_host(self) -> None:
        own = self._parts[self._place.local]
        peers = self._others(self._place.row)
        self._add_up(_TAGS[0], own, [(rank, self._parts[place]) for place, rank in peers])

    def _add_up_over_hosts(self) -> None:
        own = self._own[self._place.host]
        peers = [(rank, self._own[host]) for host, rank in self._others(self._place.column)]
        self._add_up(_TAGS[1], own, peers)
        self._hand_out(_TAGS[2], own, peers)

    def _hand_out_on_host(self) -> None:
        peers = self._others(self._place.row)
        own = self._parts[self._place.local]
        self._hand_out(_TAGS[3], own, [(rank, self._parts[place]) for place, rank in peers])

    def _others(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """The places of the other `ranks`, and those."""
        own = self._place.row[self._place.local]
        return [(place, rank) for place, rank in enumerate(ranks) if rank != own]

    def _add_up(
        self, tag: int, own: torch.Tensor, peers: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Send each peer its part, and add what the peers send of this rank's own, in order."""
        received = own.new_empty(len(peers), own.numel())
        ranks = [rank for rank, _ in peers]
        self._exchange(tag, peers, zip(ranks, received, strict=True))
        for tensor in received:
            own.add_(tensor)

    def _hand_out(
        self, tag: int, own: torch.Tensor, peers: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Send this rank's own part to each peer, and receive theirs."""
        self._exchange(tag, [(rank, own) for rank, _ in peers], peers)

    def _exchange(self, *arguments: Any) -> None:
        self._messages.exchange(self._process_group, *arguments)


def _work(
    stage: int,
    queue: SimpleQueue[_Piece | None],
    next_queue: SimpleQueue[_Piece | None] | None,
) -> None:
    """Run `stage` of one piece after the other; pass each on, and at last None, which ends it."""
    while True:
        piece = queue.get()
        if piece is not None:
            piece.run(stage)
        if next_queue is not None:
            next_queue.put(piece)
        if piece is None:
            return
        del piece  # this frame must not hold it while the thread waits for the next one


@atexit.register
def _join_threads() -> None:
    """Wait for what is on its way when the process ends.

    A thread that came out of the backend later would find no interpreter, and abort the process.
    """
    deadline = time.monotonic() + _AT_EXIT_S
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
