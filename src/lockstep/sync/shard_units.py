# SPDX-License-Identifier: Apache-2.0
"""Which submodules of a model are *units*: gathered before their forward, freed after it.

What no unit holds belongs to the model's root, which is gathered for the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from torch import nn

from lockstep._torch_compat import compiled_from
from lockstep.errors import (
    ConfigurationError,
    NotAvailableError,
    SparseGradientError,
    WrongTypeError,
)
from lockstep.sync.local_parameters import is_local
from lockstep.sync.synced_tensors import refuse_shared_memory

if TYPE_CHECKING:
    import torch

ShardPolicy: TypeAlias = str | Sequence[type[nn.Module]] | Callable[[nn.Module], bool]
"""``"auto"``, ``"whole"``, classes of modules, or a function that says of a module whether it is
a unit."""

_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def check_policy(shard: ShardPolicy) -> None:
    """Refuse what is no policy.

    Raises:
        ConfigurationError, WrongTypeError: it is none.
    """
    if isinstance(shard, str):
        if shard in ("auto", "whole"):
            return
    elif callable(shard) and not isinstance(shard, type):
        return
    elif isinstance(shard, list | tuple | set | frozenset) and shard:
        if all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in shard):
            return
        raise WrongTypeError(
            "register(shard=...) lists something that is no class of modules",
            got=", ".join(f"{kind!r:.60}" for kind in shard),
            fix="shard=[TransformerBlock]",
        )
    raise ConfigurationError(
        "register(shard=...) does not say which modules are units",
        expected='"auto", "whole", a list of module classes, or a function of a module',
        got=f"{shard!r:.80}",
    )


def find_units(model: nn.Module, shard: ShardPolicy) -> dict[str, nn.Module]:
    """The units of a model by name, in the order of registration; none lies within another.

    Args:
        model: the root, which is no unit itself.
        shard: "auto": the members of containers (``ModuleList``, ``Sequential``, ``ModuleDict``)
            that hold parameters and are of a class that the container holds twice or more.

    Raises:
        ConfigurationError: a unit shares a parameter with the rest of the model, so that neither
            could be freed.
    """
    if shard == "whole":
        return {}
    found = {
        name: module
        for name, module in _outermost(model, _predicate(shard))
        if any(True for _ in module.parameters())
    }
    return _without_shared(model, found, may_drop=shard == "auto")


def refuse_unmatched(models: Sequence[nn.Module], shard: ShardPolicy) -> None:
    """Refuse a policy that names no submodule of any model.

    A model without one (a criterion with a weight) is gathered as a whole.

    Raises:
        ConfigurationError: no module is one of the classes that `shard` lists.
    """
    if isinstance(shard, str) or any(find_units(model, shard) for model in models):
        return
    raise ConfigurationError(
        "register(shard=...) matches no submodule",
        where=", ".join(type(model).__name__ for model in models),
        got=f"{shard!r:.80}",
        fix='the classes of the repeated blocks, or shard="auto"',
    )


def refuse_models(models: Sequence[nn.Module]) -> None:
    """Refuse models whose units cannot be gathered and freed one by one.

    Raises:
        ConfigurationError: two models share a parameter, which each would cut up.
        NotAvailableError: a model was compiled as a whole: its units are no calls of modules; or
            two parameters share memory.
    """
    named = ((name, param) for model in models for name, param in model.named_parameters())
    refuse_shared_memory(named, 'register(shard="whole")')
    owners: dict[int, int] = {}
    for place, model in enumerate(models):
        if compiled_from(model) is not model:
            raise NotAvailableError(
                "a compiled model cannot be gathered unit by unit",
                where=type(compiled_from(model)).__name__,
                fix="register the model itself, and compile its units: block.compile()",
            )
        for name, param in model.named_parameters():
            if owners.setdefault(id(param), place) != place and not is_local(param):
                raise ConfigurationError(
                    f"`{name}` belongs to two registered modules",
                    cause="each would keep its own rows of it",
                    fix='put both into one module, or register(shard="whole")',
                )


def refuse_unshardable(model: nn.Module, units: dict[str, nn.Module]) -> None:
    """Refuse parameters that have no rows to share out, or that do not travel together.

    Raises:
        NotAvailableError: names the first one.
    """
    within = {id(p): name for name, unit in units.items() for p in unit.parameters()}
    dtypes: dict[str, tuple[str, torch.dtype]] = {}
    for name, param in model.named_parameters():
        if is_local(param):
            continue
        unit = within.get(id(param), "the root")
        known = dtypes.setdefault(unit, (name, param.dtype))
        if param.dim() == 0 or param.is_complex():
            what = "complex" if param.is_complex() else "a scalar"
            got = f"`{name}` is {what}"
            fix = "give it a dimension (shape (1,))" if not param.is_complex() else "view_as_real"
        elif not param.is_contiguous():
            got = f"`{name}` has strides {param.stride()} (channels_last?)"
            fix = "param.data = param.data.contiguous() before register"
        elif known[1] != param.dtype:
            got = f"`{known[0]}` is {known[1]}, `{name}` is {param.dtype}, both in {unit}"
            fix = "one dtype for each unit; precision='bf16' computes in bfloat16"
        else:
            continue
        raise NotAvailableError(
            "this parameter cannot be sharded", got=got, fix=f'{fix}; or register(shard="whole")'
        )


def refuse_sparse(models: Sequence[nn.Module]) -> None:
    """Refuse embeddings with sparse gradients, which have no rows to share out.

    Raises:
        SparseGradientError: names the first one.
    """
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                weight = module.weight
                if weight.requires_grad and not is_local(weight):
                    raise SparseGradientError(
                        "a sparse gradient cannot be summed in shards",
                        got=f"`{name}.weight`".replace("`.", "`"),
                        cause=f"nn.{type(module).__name__}(sparse=True)",
                        fix="use sparse=False, or mark the parameter: lockstep.local(parameter)",
                    )


def _predicate(shard: ShardPolicy) -> Callable[[nn.Module, nn.Module | None], bool]:
    """Whether a module is a unit, given its parent."""
    if isinstance(shard, str):
        return _is_repeated
    if not callable(shard):
        kinds: tuple[type[nn.Module], ...] = tuple(shard)
        return lambda module, _: isinstance(module, kinds)
    policy = shard
    return lambda module, _: bool(policy(module))


def _is_repeated(module: nn.Module, parent: nn.Module | None) -> bool:
    if not isinstance(parent, _CONTAINERS) or isinstance(module, _CONTAINERS):
        return False
    alike = [child for child in parent.children() if type(child) is type(module)]
    return len(alike) > 1


def _outermost(
    model: nn.Module, is_unit: Callable[[nn.Module, nn.Module | None], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules below `model` for which `is_unit` holds, each once."""
    seen: set[int] = set()
    waiting = [(name, child, model) for name, child in reversed(list(model.named_children()))]
    while waiting:
        name, module, parent = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if is_unit(module, parent):
            yield name, module
            continue
        children = reversed(list(module.named_children()))
        waiting += [(f"{name}.{key}", child, module) for key, child in children]


def _without_shared(
    model: nn.Module, units: dict[str, nn.Module], *, may_drop: bool
) -> dict[str, nn.Module]:
    """The units that share no parameter with another unit or with the root."""
    unit_of = {id(part): name for name, unit in units.items() for part in unit.modules()}
    owners: dict[int, set[str]] = {}
    tied: list[str] = []
    for path, part in model.named_modules():
        for key, param in part.named_parameters(recurse=False, remove_duplicate=False):
            places = owners.setdefault(id(param), set())
            places.add(unit_of.get(id(part), ""))
            if len(places) > 1:
                tied.append(f"{path}.{key}".lstrip("."))
    shared = {unit for places in owners.values() if len(places) > 1 for unit in places}
    if shared and not may_drop:
        raise ConfigurationError(
            "a unit shares a parameter with the rest of the model",
            where=f"`{tied[0]}`",
            cause="tied weights: one of their owners would be freed while the other needs them",
            fix="leave the tied layers out of register(shard=...): the root keeps them whole",
        )
    return {name: unit for name, unit in units.items() if name not in shared}
