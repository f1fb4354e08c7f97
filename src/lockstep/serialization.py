# SPDX-License-Identifier: Apache-2.0
"""Serialises what crosses processes: arguments and results, states with tensors, exceptions.

Everything is a cloudpickle. A state is pickled in two parts: its tensors are taken out of the
pickle as byte buffers, so that nothing large is copied into a pickle, and each sender chooses how
they travel (over a process group, as arrays in Ray's object store, in one block over a socket).

The processes of a run trust each other and share their code; a checkpoint, which a stranger may
have written, is no pickle (see `lockstep.checkpoint`).
"""

from __future__ import annotations

import io
import pickle
import warnings
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from lockstep._torch_compat import children_by_key
from lockstep.errors import NotPicklableError
from lockstep.tensor_copies import as_bytes, is_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np

    Buffer = torch.Tensor | np.ndarray[Any, Any]

_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...] | None, "_Place | None"]
"""A tensor's dtype, shape and strides, and its place if that counts. None for the strides: its
numbers are sent row by row, as it has gaps in memory, or several elements in one place."""

_Place = tuple[tuple[int, ...], int]
"""The strides with which a tensor lies in memory, and how far from a multiple of `_LINE` it begins:
kernels choose by both how they add, and so the last bits of a sum depend on them."""

_LINE: Final = 64
"""Bytes: to a multiple of it torch aligns what it allocates on a CPU."""

_ALIGNMENT: Final = 16
"""Bytes: a tensor of any dtype may begin at a multiple of it."""


def dumps(value: Any) -> bytes:
    """As `cloudpickle.dumps`, also of modules that torch has parametrized, and of loaders whose
    processes run."""
    with io.BytesIO() as file:
        _Pickler(file, None).dump(value)
        return file.getvalue()


def dumps_or_refuse(value: Any, what: str) -> bytes:
    """As `dumps`; an error says `what` cannot be sent.

    Raises:
        NotPicklableError: names `what` and the type that cannot be pickled.
    """
    try:
        return dumps(value)
    # Whatever a user's __reduce__ raises; the usual ones are TypeError and PicklingError.
    except Exception as error:
        raise NotPicklableError(
            f"{what} cannot be sent to another process",
            got=f"{type(error).__name__}: {error}",
            fix="make it in `setup` (which runs in the worker), or pass what it is made from",
        ) from error


def dumps_exception(error: BaseException, instead: Exception) -> bytes:
    """`error` as a pickle; a pickle of `instead` where it would not arrive as what it is.

    An exception that is no `Exception` (SystemExit, KeyboardInterrupt) does not cross either: it
    would end the process that it arrives in.
    """
    if isinstance(error, Exception):
        try:
            data = dumps(error)
            if type(pickle.loads(data)) is type(error):
                return data
        # Whatever a user's __reduce__ or __init__ raises: the failure itself must get through.
        except Exception:
            pass
    return dumps(instead)


def split(state: Any, *, keeps_places: bool = False) -> tuple[bytes, list[torch.Tensor]]:
    """`state` as a pickle without its tensors, and the bytes of each tensor, on the CPU.

    A tensor that lies contiguously on the CPU is not copied.

    Args:
        keeps_places: tensors of the CPU arrive with the strides and the alignment that they have
            here, so that kernels compute the same bits from them.
    """
    buffers: list[torch.Tensor] = []
    with io.BytesIO() as file:
        _Pickler(file, buffers, keeps_places=keeps_places).dump(state)
        return file.getvalue(), buffers


def join(head: bytes, buffers: Sequence[Buffer]) -> Any:
    """The state that `split` took apart. The tensors lie in `buffers`, maybe read-only arrays."""
    return _Unpickler(io.BytesIO(head), buffers).load()


def pack(buffers: Sequence[torch.Tensor], device: torch.device | str = "cpu") -> torch.Tensor:
    """One block of bytes with the bytes of all `buffers`, each aligned for any dtype."""
    sizes = [buffer.numel() for buffer in buffers]
    block = torch.empty(packed_size(sizes), dtype=torch.uint8, device=device)
    for buffer, place in zip(buffers, unpack(block, sizes), strict=True):
        place.copy_(buffer)
    return block


def unpack(block: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The buffers of these sizes in bytes that `pack` has put into `block`, as views into it."""
    padded = block.split([_padded(size) for size in sizes])
    return [buffer[:size] for buffer, size in zip(padded, sizes, strict=True)]


def packed_size(sizes: Sequence[int]) -> int:
    """Bytes of the block into which `pack` puts buffers of these sizes."""
    return sum(map(_padded, sizes))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Any cloudpickle, but for parametrized modules, for loaders with persistent workers, and for
    tensors if `buffers` is a list.

    torch gives a parametrized module (`weight_norm`, `orthogonal`) a class of its own, made on the
    spot, and refuses to pickle it. Pickled are the class that it had before, what the module holds,
    and which of its tensors are computed. A loader that was iterated over with
    ``persistent_workers=True`` keeps its processes in an iterator, which cannot be pickled. Without
    it the loader starts processes of its own where it arrives, when it is iterated over there.
    """

    def __init__(
        self,
        file: io.BytesIO,
        buffers: list[torch.Tensor] | None,
        *,
        keeps_places: bool = False,
    ) -> None:
        super().__init__(file)
        self._buffers = buffers
        self._keeps_places = keeps_places

    def persistent_id(self, obj: Any) -> _Layout | None:
        # Exactly tensors: a subclass knows itself what it is made of.
        if self._buffers is None or type(obj) is not torch.Tensor or not is_block(obj):
            return None
        tensor = obj.detach().cpu()
        in_memory = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
        is_dense = in_memory.is_contiguous()
        self._buffers.append(as_bytes(in_memory if is_dense else tensor))
        keeps_place = self._keeps_places and obj.device.type == "cpu"
        place = (obj.stride(), obj.data_ptr() % _LINE) if keeps_place else None
        return obj.dtype, obj.shape, tensor.stride() if is_dense else None, place

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            plain = type(obj).__bases__[0]
            parametrized: Any = children_by_key(obj)["parametrizations"]
            names = list(parametrized)
            return _bare_module, (plain, names), vars(obj), None, None, _fill_module
        if isinstance(obj, DataLoader):
            return _without_iterator(obj.__reduce_ex__(self.proto))
        is_tensor = type(obj) in (torch.Tensor, nn.Parameter)
        if is_tensor and obj.device.type not in ("cpu", "meta"):
            return in_host_memory(obj).__reduce_ex__(2)
        return super().reducer_override(obj)


def _without_iterator(reduced: Any) -> Any:
    """What a loader's `__reduce_ex__` has returned, without the iterator that it keeps."""
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    if not isinstance(state, dict) or state.get("_iterator") is None:
        return reduced
    return *reduced[:2], {**state, "_iterator": None}, *reduced[3:]


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor or parameter as a process without an accelerator can load it, marks included."""
    moved = tensor.detach().cpu()
    if type(tensor) is nn.Parameter:
        moved = nn.Parameter(moved, requires_grad=False)
    vars(moved).update(vars(tensor))  # such as the mark of `lockstep.local`
    return moved.requires_grad_(tensor.requires_grad)


class _Unpickler(pickle.Unpickler):
    """Meets the tensors in the order in which the pickler met them."""

    def __init__(self, file: io.BytesIO, buffers: Sequence[Buffer]) -> None:
        super().__init__(file)
        self._buffers: Iterator[Buffer] = iter(buffers)

    def persistent_load(self, pid: Any) -> torch.Tensor:
        dtype, shape, stride, place = pid
        buffer = next(self._buffers)
        if not shape.numel():
            return torch.empty(shape, dtype=dtype, device="cpu")
        if not isinstance(buffer, torch.Tensor):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                buffer = torch.from_numpy(buffer)
        numbers = buffer.view(dtype)
        if stride is None:
            tensor = numbers.view(shape)
        else:
            tensor = numbers.as_strided(shape, stride, numbers.storage_offset())
        return tensor if place is None else _laid_out(tensor, place)


def _laid_out(tensor: torch.Tensor, place: _Place) -> torch.Tensor:
    """A copy of `tensor` with these strides, at an address of this alignment."""
    strides, address = place
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    size = tensor.element_size()
    memory = torch.empty(span * size + 2 * _LINE, dtype=torch.uint8, device="cpu")
    begin = (address - memory.data_ptr()) % _LINE
    # Numbers at no multiple of their size are no tensor's of torch's own.
    numbers = memory[begin - begin % size : begin - begin % size + span * size].view(tensor.dtype)
    copy = numbers.as_strided(tensor.shape, strides, numbers.storage_offset())
    # Where several elements are in one place (`expand`), each of them is written once.
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    copy[once].copy_(tensor[once])
    return copy


def _bare_module(plain: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """A module of the class that torch makes, with nothing in it."""
    module = plain.__new__(plain)
    # What `register_parametrization` calls; by itself it would compute other values.
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def _fill_module(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    vars(module).update(attributes)
