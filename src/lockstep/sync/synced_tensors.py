# SPDX-License-Identifier: Apache-2.0
"""`SyncedTensors`: the parameters and buffers of modules to synchronise, each tensor once.

Also sentences about tensors that cannot be synchronised: all ranks refuse them together, when they
compare their models (`replica_checks.compare_structures`).
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch

from lockstep._torch_compat import buffers_of, parameters_of, storage_key
from lockstep.errors import NotAvailableError, WrongTypeError
from lockstep.sync.buffer_broadcast import BufferPlace, may_be_filled
from lockstep.sync.local_parameters import is_local, is_local_buffer, mark_copies
from lockstep.tensor_copies import fresh_strides, is_block

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Entry = list[Any]
"""Of one tensor, JSON-able: kind, name, shape, dtype, strides, requires_grad."""


@dataclass
class SyncedTensors:
    """The synchronised parameters and buffers of some modules, each tensor once.

    Attributes:
        parameters: name to parameter, in registration order.
        buffers: name to place, in registration order.
        refused: what cannot be synchronised at all, one sentence each.
        batch_dependent: weights of embeddings whose training depends on which rows a forward has
            together, by the option that makes them so.
        local: the parameters that the program has marked with `local`.
    """

    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, BufferPlace] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    batch_dependent: dict[str, list[str]] = field(default_factory=dict)
    local: list[torch.nn.Parameter] = field(default_factory=list)
    _structure: list[Entry] | None = field(default=None, init=False)

    def structure(self) -> list[Entry]:
        """The entries that must be equal on all ranks; with the strides of views in a bucket."""
        named: list[tuple[str, str, torch.Tensor]]
        named = [("parameter", name, param) for name, param in self.parameters.items()]
        named += [
            ("buffer", name, tensor)
            for name, place in self.buffers.items()
            if (tensor := place.tensor()) is not None
        ]
        self._structure = [
            [
                kind,
                name,
                [tensor.size(0)] if tensor.is_nested else list(tensor.shape),
                str(tensor.dtype),
                _strides(tensor),
                tensor.requires_grad,
            ]
            for kind, name, tensor in named
        ]
        return self._structure

    def signature(self) -> int:
        """A hash modulo 64 of the `structure`, as it was asked for last; two models may collide."""
        return zlib.crc32(repr(self._structure or self.structure()).encode()) % 64


def _strides(tensor: torch.Tensor) -> list[int] | str:
    """The strides of a fresh tensor like `tensor`; its layout in words, where it has no strides."""
    if is_block(tensor):
        return list(fresh_strides(tensor))
    return "quantized" if tensor.is_quantized else str(tensor.layout)


def as_modules(model: Any) -> list[torch.nn.Module]:
    """One module or a sequence of modules, as a list.

    Raises:
        WrongTypeError: something else.
    """
    modules: Any = [model] if isinstance(model, torch.nn.Module) else model
    if (
        isinstance(modules, (list, tuple))
        and modules
        and all(isinstance(module, torch.nn.Module) for module in modules)
    ):
        return list(modules)
    raise WrongTypeError(
        "gradients are synchronised for a module or a sequence of modules",
        got=type(model).__name__,
        fix="lockstep.replicate(model) or lockstep.replicate([generator, discriminator])",
    )


def refuse_scripted(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse TorchScript's modules, which take no new attributes, buffers or hooks.

    Raises:
        WrongTypeError: names the first one.
    """
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise WrongTypeError(
                    "a module that TorchScript has compiled cannot be synchronised",
                    where=f"`{name}`" if name else "the model itself",
                    got=f"{type(part).__name__} of {part.original_name}",
                    cause="its parameters and buffers cannot be replaced, nor can it be copied",
                    fix="hand over the model itself: torch.jit.script(model) afterwards shares its"
                    " weights, and torch.compile(model) may come before or after; keep a scripted"
                    " part that does not train outside of it",
                )


def find_synced_tensors(modules: Sequence[torch.nn.Module]) -> SyncedTensors:
    """Walk the modules. A shared tensor counts once, under its first name; a local one never."""
    found = SyncedTensors()
    seen: set[int] = set()
    # A criterion that holds no tensor leaves a lone model's names as the user knows them.
    several = sum(map(_holds_tensors, modules)) > 1
    mark_copies(modules)
    for position, module in enumerate(modules):
        for name, owner in module.named_modules(prefix=f"[{position}]" if several else ""):
            prefix = f"{name}." if name else ""
            refusal = _refuse_module(owner, prefix)
            if refusal:
                found.refused.append(refusal)
            for option in batch_dependent_options(owner):
                found.batch_dependent.setdefault(option, []).append(f"`{prefix}weight`")
            _collect(found, owner, prefix, seen)
    if any(param.device.type != "cpu" for param in found.parameters.values()):
        # Buffers that are None stay each rank's own on an accelerator: to learn that rank 0 has
        # filled one, the ranks would wait for the device in every step.
        filled = {
            name: place for name, place in found.buffers.items() if place.tensor() is not None
        }
        found.buffers = filled
    return found


def _holds_tensors(module: torch.nn.Module) -> bool:
    return next(chain(module.parameters(), module.buffers()), None) is not None


def _collect(found: SyncedTensors, owner: torch.nn.Module, prefix: str, seen: set[int]) -> None:
    for key, param in parameters_of(owner).items():
        if param is None or id(param) in seen:
            continue
        seen.add(id(param))
        if is_local(param):
            found.local.append(param)
            continue
        refusal = _refuse_parameter(param, prefix + key)
        if refusal:
            found.refused.append(refusal)
        else:
            found.parameters[prefix + key] = param
    for key, buffer in buffers_of(owner).items():
        if id(buffer) in seen or is_local_buffer(owner, key):
            continue
        if buffer is None:
            # The first forward may fill it, on each rank from its own rows.
            if may_be_filled(owner):
                found.buffers[prefix + key] = BufferPlace(owner, key)
            continue
        seen.add(id(buffer))
        if isinstance(buffer, torch.nn.parameter.UninitializedBuffer):
            found.refused.append(_refuse_lazy("buffer", prefix + key))
        else:
            found.buffers[prefix + key] = BufferPlace(owner, key)


def _refuse_module(module: torch.nn.Module, name: str) -> str | None:
    # Looked up and not imported: without the import there is no instance of DDP.
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is not None and isinstance(module, parallel.DistributedDataParallel):
        where = name.rstrip(".") or "the model"
        return f"{where} is wrapped in DistributedDataParallel, which reduces its gradients already"
    return None


def batch_dependent_options(module: torch.nn.Module) -> list[str]:
    """The options by which an embedding trains otherwise where a batch is split.

    With ``max_norm`` a forward writes to the rows of its own batch. With ``scale_grad_by_freq`` a
    gradient is divided by how often its row is in the forward's own batch. A frozen embedding is
    the same on all ranks wherever it is read.
    """
    if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return []
    if not module.weight.requires_grad or is_local(module.weight):
        return []
    is_on = {
        "max_norm": module.max_norm is not None,
        "scale_grad_by_freq": module.scale_grad_by_freq,
    }
    return [option for option, is_wanted in is_on.items() if is_wanted]


def _refuse_lazy(kind: str, name: str) -> str:
    return f"`{name}` is a lazy {kind} without a shape yet: run one forward first"


def _refuse_parameter(param: torch.nn.Parameter, name: str) -> str | None:
    if isinstance(param, torch.nn.parameter.UninitializedParameter):
        return _refuse_lazy("parameter", name)
    kind = type(param).__name__
    if kind == "DTensor" or type(param.data).__name__ == "DTensor":
        return f"`{name}` is a DTensor: its gradients belong to its own device mesh"
    if kind == "FlatParameter":
        return f"`{name}` belongs to FullyShardedDataParallel"
    if not is_block(param):
        return f"`{name}` is a {_strides(param)} tensor, whose gradient has no fixed place"
    if not param.is_leaf:
        return f"`{name}` is not a leaf of the autograd graph"
    grad_dtype = getattr(param, "grad_dtype", param.dtype)  # torch 2.13 and newer have it
    if grad_dtype != param.dtype:
        return f"`{name}`, {param.dtype}, has grad_dtype={grad_dtype}: delete what sets it"
    return None


def refuse_shared_memory(named: Iterable[tuple[str, torch.Tensor]], fix: str) -> None:
    """Refuse two parameters in one memory, for a synchronisation that copies each to another place.

    A tie through ``p.data`` would be lost: one process steps what both stand for.

    Args:
        named: the parameters; a tied one, which is there twice, is no matter.
        fix: what else the program can do.

    Raises:
        NotAvailableError: names the two.
    """
    distinct = {id(tensor): (name, tensor) for name, tensor in named if is_block(tensor)}
    spans = sorted((*_span(tensor), name) for name, tensor in distinct.values() if tensor.numel())
    for (memory, _, end, name), (other_memory, begin, _, other) in pairwise(spans):
        if memory == other_memory and begin < end:
            raise NotAvailableError(
                "two parameters share memory",
                got=f"`{name}` and `{other}`",
                cause="one of them was set to the other's `.data`",
                fix=f"tie the parameter itself: `b.weight = a.weight`; or {fix}",
            )


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The tensor's storage, and where in it its bytes begin and end."""
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return storage_key(tensor), begin, begin + (int(steps) + 1) * tensor.itemsize
