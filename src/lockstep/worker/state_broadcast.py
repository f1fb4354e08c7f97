# SPDX-License-Identifier: Apache-2.0
"""One rank's state, sent to ranks that are behind it or have joined.

Structure and tensors travel apart: the structure pickled (the ranks of a run trust each other,
and share their code), the tensors in blocks of bytes, so that nothing large is pickled.
"""

from __future__ import annotations

import io
import pickle
import zlib
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import torch

from lockstep.errors import ReplicasDifferError
from lockstep.sync import is_block, is_local
from lockstep.sync.packed_tensors import pack, unpack

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
    tensors: list[torch.Tensor] = []
    structure = taken_apart(state, tensors)
    blocks = [pack(part) for part in _parts(tensors)]
    head = pickle.dumps((structure, [(spec, block.numel()) for spec, block in blocks]))
    group.broadcast(torch.tensor([len(head)], device=group.device), group.rank)
    group.broadcast(_bytes(head).to(group.device), group.rank)
    for _, block in blocks:
        group.broadcast(block.to(group.device), group.rank)


def receive(group: Group, source: int) -> Any:
    """What rank `source` sends.

    Collective:
        See `send`.

    Raises:
        PeerLostError: a rank went away meanwhile.
    """
    structure, blocks = _head(group, source)
    tensors: list[torch.Tensor] = []
    for spec, size in blocks:
        tensors += unpack(spec, _block(group, source, size))
    return joined(structure, tensors)


def decline(group: Group, source: int) -> None:
    """Take part in what rank `source` sends to others; nothing is kept.

    Collective:
        See `send`.
    """
    for _, size in _head(group, source)[1]:
        _block(group, source, size)


def agree_on_bits(group: Group, run: TrainingParts, *, with_optimizers: bool) -> None:
    """Make sure that all ranks hold the same weights, and the same states of optimizers.

    Collective:
        Every rank. One small exchange.

    Raises:
        ReplicasDifferError: on every rank, if the bits differ.
    """
    sums = [_sum_of_bits(tensor) for tensor in _shared_tensors(run, with_optimizers)]
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


def _head(group: Group, source: int) -> tuple[bytes, list[Any]]:
    length = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.broadcast(length, source)
    head = torch.empty(int(length.item()), dtype=torch.uint8, device=group.device)
    group.broadcast(head, source)
    structure, blocks = pickle.loads(bytes(head.cpu().numpy()))
    return structure, blocks


def _block(group: Group, source: int, size: int) -> torch.Tensor:
    block = torch.empty(size, dtype=torch.uint8, device=group.device)
    group.broadcast(block, source)
    return block.cpu()


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        part.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _BLOCK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def taken_apart(state: Any, tensors: list[torch.Tensor]) -> bytes:
    """`state` with the places of its tensors; the tensors are put into `tensors`."""
    buffer = io.BytesIO()
    _Pickler(buffer, tensors).dump(state)
    return buffer.getvalue()


def joined(structure: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """What `taken_apart` took apart."""
    return _Unpickler(io.BytesIO(structure), tensors).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> int | None:
        # Exactly tensors: a subclass knows itself what it is made of.
        if type(obj) is not torch.Tensor or not is_block(obj):
            return None
        self._tensors.append(obj.detach().cpu())
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        index: int = pid
        return self._tensors[index]


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


def _sum_of_bits(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat
    return int(words.sum(dtype=torch.int64))
