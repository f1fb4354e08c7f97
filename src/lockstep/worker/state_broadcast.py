# SPDX-License-Identifier: Apache-2.0
"""One rank's state, broadcast to ranks that are behind it or have joined.

The structure of the state is one message, its tensors follow in blocks of bytes: a second copy of
the whole state would not fit beside a large model.
"""

from __future__ import annotations

import pickle
import zlib
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import ReplicasDifferError
from lockstep.serialization import join, pack, packed_size, split, unpack
from lockstep.sync import is_local
from lockstep.sync.inventory import sum_of_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lockstep.group import Group
    from lockstep.operator.training_parts import TrainingParts

_BLOCK_BYTES: Final = 64 * 2**20


def send(group: Group, state: Any) -> None:
    """Give `state` to every other rank of `group`.

    Collective:
        Every rank: the others call `receive` or `decline` with this one as the source.
        Broadcasts: a head of two numbers, the structure, one per block of 64 MiB.
    """
    structure, buffers = split(state)
    blocks = list(_blocks(buffers))
    head = pickle.dumps((structure, [[buffer.numel() for buffer in block] for block in blocks]))
    group.broadcast(torch.tensor([len(head)], device=group.device), group.rank)
    group.broadcast(
        torch.frombuffer(bytearray(head), dtype=torch.uint8).to(group.device), group.rank
    )
    for block in blocks:
        group.broadcast(pack(block).to(group.device), group.rank)


def receive(group: Group, source: int) -> Any:
    """The state that rank `source` sends.

    Collective:
        See `send`.

    Raises:
        PeerLostError: a rank went away meanwhile.
    """
    structure, blocks = _head(group, source)
    buffers: list[torch.Tensor] = []
    for sizes in blocks:
        buffers += unpack(_bytes_from(group, source, packed_size(sizes)).cpu(), sizes)
    return join(structure, buffers)


def decline(group: Group, source: int) -> None:
    """Take part in the broadcasts of rank `source`, and keep nothing.

    Collective:
        See `send`.
    """
    for sizes in _head(group, source)[1]:
        _bytes_from(group, source, packed_size(sizes))


def _head(group: Group, source: int) -> tuple[bytes, list[list[int]]]:
    length = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.broadcast(length, source)
    head = _bytes_from(group, source, int(length.item()))
    structure, blocks = pickle.loads(bytes(head.cpu().numpy()))
    return structure, blocks


def _bytes_from(group: Group, source: int, size: int) -> torch.Tensor:
    received = torch.empty(size, dtype=torch.uint8, device=group.device)
    group.broadcast(received, source)
    return received


def _blocks(buffers: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    block: list[torch.Tensor] = []
    size = 0
    for buffer in buffers:
        block.append(buffer)
        size += buffer.numel()
        if size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def agree_on_bits(group: Group, run: TrainingParts, *, with_optimizers: bool) -> None:
    """Make sure that all ranks hold the same weights, and the same states of optimizers.

    Collective:
        Every rank. One small exchange.

    Raises:
        ReplicasDifferError: on every rank, if the bits differ.
    """
    sums = [sum_of_bits(tensor) for tensor in _shared_tensors(run, with_optimizers)]
    everyone = group.exchange([len(sums), zlib.crc32(repr(sums).encode())])
    differ = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if differ:
        raise ReplicasDifferError(
            "the workers' weights, or the states of their optimizers, differ",
            where=f"rank {', '.join(map(str, differ))} against rank 0",
            cause="they had drifted apart before the failure, or something besides the optimizers"
            " wrote to the weights on some ranks only",
            fix="load the last checkpoint into a new trainer, and look with `lockstep audit`",
        )


def _shared_tensors(run: TrainingParts, with_optimizers: bool) -> Iterator[torch.Tensor]:
    shared = [parameter for parameter in run.parameters() if not is_local(parameter)]
    yield from shared
    for model, average in zip(run.plain_models(), run.averages, strict=False):
        pairs = zip(model.parameters(), average.module.parameters(), strict=False)
        yield from (averaged for parameter, averaged in pairs if not is_local(parameter))
    if not with_optimizers:
        return
    for optimizer in run.optimizers:
        states = (optimizer.state.get(parameter, {}) for parameter in shared)
        values = chain.from_iterable(state.values() for state in states)
        yield from (value for value in values if isinstance(value, torch.Tensor))
