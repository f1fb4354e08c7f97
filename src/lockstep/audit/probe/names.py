# SPDX-License-Identifier: Apache-2.0
"""What the user calls a parameter, found without being told which object is the model."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WRAPPED = ("module", "_orig_mod", "_forward_module", "_original_module", "_fsdp_wrapped_module")


def living_modules() -> list[torch.nn.Module]:
    """Every module of this process. Once per new optimizer: it looks at all objects."""
    found = []
    for thing in gc.get_objects():
        # Not isinstance: objects that pretend a class may run code when asked.
        if issubclass(type(thing), torch.nn.Module) and "_modules" in thing.__dict__:
            found.append(thing)
    return found


def parts_of(root: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """A module and all below it with their names; one that has two names comes twice.

    Neither this nor `held_by` asks the module, whose class may override ``named_modules`` and
    ``named_parameters``.
    """
    yield name, root
    for own, child in root._modules.items():
        if child is not None:
            yield from parts_of(child, f"{name}.{own}" if name else own)


def held_by(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """All parameters of a module with their names; one that has two names comes twice."""
    for prefix, part in parts_of(root):
        for name, param in part._parameters.items():
            if param is not None:
                yield f"{prefix}.{name}" if prefix else name, param


def outermost(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of them that are no other's child."""
    inside = {id(child) for module in modules for child in module._modules.values() if child}
    return [module for module in modules if id(module) not in inside]


def parameter_names(modules: Iterable[torch.nn.Module]) -> dict[int, str]:
    """By ``id(parameter)``: its name in the outermost module, wrappers left out."""
    roots = outermost(list(modules))
    names: dict[int, str] = {}
    roots.sort(key=lambda root: -sum(1 for _ in parts_of(root)))
    for root in roots:
        for name, param in held_by(root):
            names.setdefault(id(param), _without_wrappers(root, name))
    return names


def _without_wrappers(root: torch.nn.Module, name: str) -> str:
    parts = name.split(".")
    kept = []
    module: torch.nn.Module | None = root
    for part in parts:
        if not (part in _WRAPPED and module is not None and _is_wrapper(module)):
            kept.append(part)
        module = module._modules.get(part) if module is not None else None
    return ".".join(kept)


def _is_wrapper(module: torch.nn.Module) -> bool:
    """A module whose only child is what it wraps."""
    return len(module._modules) == 1 and next(iter(module._modules)) in _WRAPPED
