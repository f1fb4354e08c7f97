# SPDX-License-Identifier: Apache-2.0
"""What there is to synchronise in some modules, and whether all ranks have the same."""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import ConfigurationError, ReplicasDifferError, WrongTypeError
from lockstep.sync.local_parameters import is_local
from lockstep.tensor_copies import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from lockstep.group import Group

Entry = list[Any]  # [kind, name, shape, dtype, strides, requires_grad], JSON-able

_PIECE: Final = 1 << 18


@dataclass
class BufferPlace:
    """Where a buffer hangs. The place and not the tensor: modules may replace their buffers."""

    owner: torch.nn.Module
    key: str

    def tensor(self) -> torch.Tensor | None:
        return self.owner._buffers.get(self.key)


def buffer_places(modules: Iterable[torch.nn.Module]) -> list[BufferPlace]:
    """Where the buffers of `modules` hang, those that several share once."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    found = [BufferPlace(part, key) for part in parts for key in part._buffers]
    tensors = [place.tensor() for place in found]
    firsts = {id(tensor): place for tensor, place in zip(tensors[::-1], found[::-1], strict=True)}
    return [p for p, t in zip(found, tensors, strict=True) if t is not None and firsts[id(t)] is p]


@dataclass
class Inventory:
    """The synchronised parameters and buffers of some modules, each tensor once.

    Attributes:
        parameters: name to parameter, in registration order.
        buffers: name to place, in registration order.
        refused: what cannot be synchronised at all, one sentence each.
    """

    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, BufferPlace] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def structure(self) -> list[Entry]:
        """What must be equal on all ranks. Strides too: views into a bucket follow them."""
        named: list[tuple[str, str, torch.Tensor]]
        named = [("parameter", name, param) for name, param in self.parameters.items()]
        named += [
            ("buffer", name, tensor)
            for name, place in self.buffers.items()
            if (tensor := place.tensor()) is not None
        ]
        return [
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

    def signature(self) -> int:
        """A small number that is the same on all ranks and hardly the same for two models."""
        return zlib.crc32(repr(self.structure()).encode()) % 64


def _strides(tensor: torch.Tensor) -> list[int] | str:
    """Those of a fresh tensor like it; how it is laid out, where it has no strides."""
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
        return list(torch.empty_like(tensor, device="meta").stride())
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


def take_inventory(modules: Sequence[torch.nn.Module]) -> Inventory:
    """Walk the modules. Shared tensors count once, under their first name; local ones never."""
    found = Inventory()
    seen: set[int] = set()
    # A criterion that holds no tensor leaves a lone model's names as the user knows them.
    several = sum(map(_holds_tensors, modules)) > 1
    for position, module in enumerate(modules):
        prefix = f"[{position}]." if several else ""
        for name, owner, marked in _walk(module, prefix, False, set()):
            refusal = _refuse_module(owner, name)
            if refusal:
                found.refused.append(refusal)
            if not marked:
                _collect(found, owner, name, seen)
    return found


def _holds_tensors(module: torch.nn.Module) -> bool:
    return next(chain(module.parameters(), module.buffers()), None) is not None


def refuse_shared(modules: Sequence[torch.nn.Module], fix: str) -> None:
    """For ways that treat each module by itself: no parameter may belong to two of them.

    Raises:
        ConfigurationError: names the first such parameter.
    """
    owners: dict[int, int] = {}
    for place, module in enumerate(modules):
        for name, param in module.named_parameters():
            if owners.setdefault(id(param), place) != place and not is_local(param):
                raise ConfigurationError(
                    f"`{name}` belongs to two registered modules",
                    cause="each is reduced by itself, and this gradient would be reduced twice",
                    fix=fix,
                )


def _walk(
    module: torch.nn.Module, prefix: str, marked: bool, visited: set[int]
) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    if id(module) in visited:
        return
    visited.add(id(module))
    marked = marked or is_local(module)
    yield prefix, module, marked
    for key, child in module.named_children():
        yield from _walk(child, f"{prefix}{key}.", marked, visited)


def _collect(found: Inventory, owner: torch.nn.Module, prefix: str, seen: set[int]) -> None:
    for key, param in owner._parameters.items():
        if param is None or id(param) in seen or is_local(param):
            continue
        seen.add(id(param))
        refusal = _refuse_parameter(param, prefix + key)
        if refusal:
            found.refused.append(refusal)
        else:
            found.parameters[prefix + key] = param
    for key, buffer in owner._buffers.items():
        if buffer is None or id(buffer) in seen or is_local(buffer):
            continue
        seen.add(id(buffer))
        found.buffers[prefix + key] = BufferPlace(owner, key)


def _refuse_module(module: torch.nn.Module, name: str) -> str | None:
    # Looked up and not imported: who has not imported DDP has no instance of it.
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is not None and isinstance(module, parallel.DistributedDataParallel):
        where = name.rstrip(".") or "the model"
        return f"{where} is wrapped in DistributedDataParallel, which reduces its gradients already"
    return None


def _refuse_parameter(param: torch.nn.Parameter, name: str) -> str | None:
    if isinstance(param, torch.nn.parameter.UninitializedParameter):
        return f"`{name}` is a lazy parameter without a shape yet: run one forward first"
    kind = type(param).__name__
    if kind == "DTensor" or type(param.data).__name__ == "DTensor":
        return f"`{name}` is a DTensor: its gradients belong to its own device mesh"
    if kind == "FlatParameter":
        return f"`{name}` belongs to FullyShardedDataParallel"
    if param.is_nested or param.is_quantized or param.layout is not torch.strided:
        return f"`{name}` is a {_strides(param)} tensor, whose gradient has no fixed place"
    if not param.is_leaf:
        return f"`{name}` is not a leaf of the autograd graph"
    return None


def agree(group: Group, found: Inventory, settings: list[Any]) -> None:
    """Compare structure and settings of all ranks; raise on every rank or on none.

    Collective:
        Every rank. Two small all-gathers. No payload has moved yet.

    Raises:
        WrongTypeError: this rank's model holds something that cannot be synchronised.
        ReplicasDifferError: the ranks differ; names the first difference and the ranks.
    """
    mine = {"refused": found.refused, "settings": settings, "structure": found.structure()}
    everyone = group.exchange(mine)
    if found.refused:
        raise WrongTypeError(
            "this model cannot be synchronised by replicate",
            where=f"rank {group.rank} of {group.size}",
            got="; ".join(found.refused[:5]),
            fix="hand over the plain module, or mark what is each rank's own: lockstep.local(...)",
        )
    first = everyone[0]
    ranks = [rank for rank, other in enumerate(everyone) if other != first]
    if not ranks:
        return
    expected, got = _first_difference(first, everyone[ranks[0]])
    raise ReplicasDifferError(
        "the ranks did not build the same model",
        where=f"rank {', '.join(map(str, ranks))} against rank 0",
        expected=expected,
        got=got,
        cause="something in building the model depends on the rank",
        fix="build the same model on every rank, or mark what differs: lockstep.local(...)",
    )


def agree_on_values(
    group: Group, parameters: Mapping[str, torch.Tensor], *, have_stepped: bool
) -> None:
    """Compare the ranks' values, which were equal after the broadcast, by their bits.

    Args:
        group: the ranks.
        parameters: by name, the same on every rank.
        have_stepped: optimizers have, since the broadcast; for the error's words.

    Collective:
        Every rank. Two small all-gathers.

    Raises:
        ReplicasDifferError: on every rank; names the parameters and the ranks.
    """
    everyone = group.exchange([sum_of_bits(param) for param in parameters.values()])
    ranks = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if not ranks:
        return
    differ = [
        f"`{name}`"
        for name, *values in zip(parameters, *everyone, strict=True)
        if len(set(values)) > 1
    ]
    more = f" and {len(differ) - 5} more" if len(differ) > 5 else ""
    what, cause, fix = _AFTER_STEPS if have_stepped else _BEFORE_STEPS
    raise ReplicasDifferError(
        what,
        where=f"rank {', '.join(map(str, ranks))} against rank 0",
        got=", ".join(differ[:5]) + more,
        cause=cause,
        fix=fix,
    )


_BEFORE_STEPS: Final = (
    "the ranks' weights differ before the first step",
    "they were changed after they had been made equal, on some ranks only: weights loaded on rank 0"
    " after register()?",
    "load them before register(), which sends rank 0's to all; or load them on every rank",
)
_AFTER_STEPS: Final = (
    "the ranks' weights differ",
    "a rank has changed gradients or weights by itself: noise or a clip of its own, a hook on one"
    " rank, a learning rate that follows a local loss, weights loaded on some ranks",
    "compute it on all ranks from the same numbers (lockstep.gather, a seed without the rank)",
)


def sum_of_bits(tensor: torch.Tensor | None) -> int:
    """A number that tells tensors with other bits apart, hardly ever alike by chance."""
    if tensor is None:
        return -1
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = as_bytes(plain)
    if flat.storage_offset() % 4:  # a view of small elements may begin in the middle of a word
        flat = flat.clone()
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat
    # By pieces: torch makes a copy of twice the size to add integers in a wider type.
    sums = [piece.sum(dtype=torch.int64) for piece in words.split(_PIECE)]
    return int(torch.stack(sums).sum())


def _first_difference(expected: dict[str, Any], got: dict[str, Any]) -> tuple[str, str]:
    for key in ("refused", "settings"):
        if expected[key] != got[key]:
            return f"{key} {expected[key]}", f"{key} {got[key]}"
    ours, theirs = expected["structure"], got["structure"]
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            return _describe(one), _describe(other)
    longer = ours if len(ours) > len(theirs) else theirs
    extra = _describe(longer[min(len(ours), len(theirs))])
    missing = "nothing more"
    return (extra, missing) if longer is ours else (missing, extra)


def _describe(entry: Entry) -> str:
    kind, name, shape, dtype, strides, requires_grad = entry
    grad = "" if requires_grad or kind == "buffer" else ", frozen"
    laid_out = strides if isinstance(strides, str) else f"strides {tuple(strides)}"
    return f"{kind} `{name}` {tuple(shape)} {dtype} {laid_out}{grad}"


def check_options(buffers: str, bucket_cap_mb: float) -> None:
    if buffers not in ("after_backward", "manual") or not bucket_cap_mb > 0:
        raise ConfigurationError(
            "buffers is 'after_backward' or 'manual', bucket_cap_mb is above zero",
            got=f"buffers={buffers!r}, bucket_cap_mb={bucket_cap_mb!r}",
        )
