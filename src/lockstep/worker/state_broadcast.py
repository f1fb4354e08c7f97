# SPDX-License-Identifier: Apache-2.0
"""Broadcasts one rank's state to ranks that are behind it or have joined.

The structure of the state is one message, all small tensors are a second one, and each large tensor
is a message of its own: a second copy of the whole state would not fit beside a large model.
"""

from __future__ import annotations

import pickle
import zlib
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.error_texts import LOAD_LAST
from lockstep.errors import ReplicasDifferError
from lockstep.serialization import join, pack, split, unpack
from lockstep.sync import is_local
from lockstep.sync.tensor_bits import sum_of_bits
from lockstep.tensor_copies import is_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lockstep.data_parallel_mesh import DataParallelMesh
    from lockstep.group import Group
    from lockstep.operator.training_parts import TrainingParts


_LARGE: Final = 1 << 16
"""Bytes from which a tensor is a message of its own. For smaller tensors a message takes longer
than the copy into the common one."""


def send(group: Group, state: Any) -> None:
    """Send `state` to every other rank of `group`.

    Collective:
        Every rank: the others call `receive` or `decline` with this one as the source.
        Broadcasts: two for the structure, one for all small tensors, one per large tensor.
    """
    head, small, large = messages_of(state)
    length = torch.tensor([head.numel()], device="cpu")
    for message in (length, head, small, *large):
        group.broadcast(message.to(group.device), group.rank)


def messages_of(state: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The messages in which a state travels: its structure, all small tensors, each large one."""
    structure, buffers = split(state)
    small = pack([buffer for buffer in buffers if buffer.numel() < _LARGE])
    large = [buffer for buffer in buffers if buffer.numel() >= _LARGE]
    head = pickle.dumps((structure, small.numel(), [buffer.numel() for buffer in buffers]))
    return torch.frombuffer(bytearray(head), dtype=torch.uint8), small, large


def from_messages(head: torch.Tensor, small: torch.Tensor, large: Iterable[torch.Tensor]) -> Any:
    """The state that `messages_of` took apart."""
    structure, _, sizes = pickle.loads(bytes(head.numpy()))
    rest, block = iter(large), iter(unpack(small, [size for size in sizes if size < _LARGE]))
    return join(structure, [next(block) if size < _LARGE else next(rest) for size in sizes])


def receive(group: Group, source: int) -> Any:
    """The state that rank `source` sends.

    Collective:
        See `send`.

    Raises:
        PeerLostError: a rank went away meanwhile.
    """
    head, block_size, sizes = _receive_header(group, source)
    small = _receive_tensor(group, source, block_size)
    large = (_receive_tensor(group, source, size) for size in sizes if size >= _LARGE)
    return from_messages(head, small, large)


def decline(group: Group, source: int) -> None:
    """Take part in the broadcasts of rank `source`, and drop what arrives.

    Collective:
        See `send`.
    """
    _, block_size, sizes = _receive_header(group, source)
    for size in (block_size, *(size for size in sizes if size >= _LARGE)):
        _receive_tensor(group, source, size)


def _receive_header(group: Group, source: int) -> tuple[torch.Tensor, int, list[int]]:
    length = _receive_tensor(group, source, 1, torch.int64)
    head = _receive_tensor(group, source, int(length.item()))
    _, block_size, sizes = pickle.loads(bytes(head.numpy()))
    return head, block_size, sizes


def _receive_tensor(
    group: Group, source: int, size: int, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    message = torch.empty(size, dtype=dtype, device=group.device)
    group.broadcast(message, source)
    return message.cpu()


def agree_on_bits(
    group: Group, run: TrainingParts, mesh: DataParallelMesh, *, with_optimizers: bool
) -> None:
    """Make sure that all ranks hold the same weights, and the same states of optimizers.

    A rank's rows of what is in shards are those of the rank with the same place in the first copy.

    Collective:
        Every rank. One small exchange.

    Raises:
        ReplicasDifferError: on every rank, if the bits differ.
    """
    shared: list[Any] = list(_shared_tensors(run, with_optimizers))
    whole = [sum_of_bits(each) for each in shared if not is_shard(each)]
    rows = [sum_of_bits(each.to_local()) for each in shared if is_shard(each)]
    sums = [zlib.crc32(repr(each).encode()) for each in (whole, rows)]
    everyone = group.exchange([len(whole), *sums])
    first_copy = everyone[: mesh.shard_size]
    differ = [
        rank
        for rank, (*of_whole, of_rows) in enumerate(everyone)
        if of_whole != everyone[0][:2] or of_rows != first_copy[rank % mesh.shard_size][2]
    ]
    if differ:
        raise ReplicasDifferError(
            "the workers' weights, or the states of their optimizers, differ",
            where=f"rank {', '.join(map(str, differ))} against rank 0",
            expected="the same bits on every rank; of shards, the same rows in every copy",
            cause="they had drifted apart before the failure, or something besides the optimizers"
            " wrote to the weights on some ranks only",
            fix=f"{LOAD_LAST}; look with `lockstep audit`",
        )


def _shared_tensors(run: TrainingParts, with_optimizers: bool) -> Iterator[torch.Tensor]:
    shared = list(run.shared_parameters())
    yield from shared
    for model, average in zip(run.plain_models(), run.averages, strict=False):
        pairs = zip(model.parameters(), average.module.parameters(), strict=False)
        yield from (averaged for parameter, averaged in pairs if not is_local(parameter))
    if not with_optimizers:
        return
    for optimizer in (*run.optimizers, *run.inner_optimizers()):
        states = (optimizer.state.get(parameter, {}) for parameter in shared)
        values = chain.from_iterable(state.values() for state in states)
        yield from (value for value in values if isinstance(value, torch.Tensor))
