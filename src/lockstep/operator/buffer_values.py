# SPDX-License-Identifier: Apache-2.0
"""The buffers of a run by name, for a process whose `setup` has made others.

A forward may fill a buffer that is None, register one, or put one of another shape or dtype in its
place, as tables of positions do that grow with the longest text. No ``load_state_dict`` takes the
values of such a buffer as they are, and those that are not persistent are in no ``state_dict``. So
a worker puts buffers in place before it loads a state: those of another worker by
`put_buffer_values`, and those of a checkpoint by `load_module`. A state names the buffers that a
forward has changed so; all others have to be as `setup` makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from lockstep._torch_compat import buffers_of, is_persistent
from lockstep.sync import is_local_buffer
from lockstep.tensor_copies import fits, is_block, is_expanded, write_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Set

    from torch import nn

    from lockstep.operator.training_parts import BufferKinds, TrainingParts

BufferValues: TypeAlias = "dict[str, dict[str, tuple[torch.Tensor | None, bool]]]"
"""For each module's path, and for each name of a buffer of it: the value, and whether the buffer is
persistent."""

KEY: Final = "buffers_since_setup"
"""The key of the names, by module, of the buffers in a state that `setup` does not make so. States
of earlier versions lack it."""


def buffer_values(
    run: TrainingParts, copy: Callable[[Any], Any] = lambda value: value
) -> BufferValues:
    """All buffers of the modules and of the averages of their weights.

    Args:
        copy: is given each value; by default what is returned holds the buffers themselves.
    """
    return {
        path: {
            key: (None if value is None else copy(value), is_persistent(owner, key))
            for key, value in buffers_of(owner).items()
        }
        for path, owner in _owners(run)
    }


def with_own_local_buffers(values: BufferValues, run: TrainingParts) -> BufferValues:
    """Another rank's `values`, with this rank's in the place of those that are each rank's own."""
    own = {
        path: {
            key: (value, is_persistent(owner, key))
            for key, value in buffers_of(owner).items()
            if is_local_buffer(owner, key)
        }
        for path, owner in _owners(run)
    }
    return {path: {**table, **own.get(path, {})} for path, table in values.items()}


@torch.no_grad()
def put_buffer_values(run: TrainingParts, values: BufferValues, device: torch.device) -> None:
    """Let the buffers be `values`, of a worker that has the same modules, and no others.

    One that a forward has registered since goes: the forward will do so again.

    Args:
        device: of buffers that `setup` has not made here.
    """
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for path, owner in _owners(run):
        # Without values: a module that was added since.
        if path in values:
            _put(owner, values[path], replaced, device)


def _put(
    owner: nn.Module,
    table: Mapping[str, tuple[torch.Tensor | None, bool]],
    replaced: dict[torch.Tensor, torch.Tensor],
    device: torch.device,
) -> None:
    """Let the module's own buffers be those of `table`, and no others.

    Args:
        replaced: the tensors in the place of others, by these, over all modules: those that share
            a buffer go on sharing it.
    """
    for key in buffers_of(owner).keys() - table.keys():
        delattr(owner, key)  # a forward has registered it
    for key, (value, persistent) in table.items():
        mine = buffers_of(owner).get(key)
        if value is mine:
            continue
        if value is None:
            buffers_of(owner)[key] = None
        elif mine is None:
            owner.register_buffer(key, value.to(device, copy=True), persistent)
        elif fits(value, mine) and not is_expanded(mine):
            write_into(mine, value)  # views of it see the value
        else:
            if mine not in replaced:
                replaced[mine] = value.to(mine.device, copy=True)
            buffers_of(owner)[key] = replaced[mine]


def _owners(run: TrainingParts) -> Iterator[tuple[str, nn.Module]]:
    for number, root in enumerate((*run.plain_modules(), *run.averages)):
        for path, owner in root.named_modules():
            yield f"{number}.{path}", owner


# ------------------------------------------------------------------------ in a ``state_dict``


def labelled_modules(run: TrainingParts) -> dict[str, nn.Module]:
    """The modules and the averages of a run, by their places in its state."""
    found = {f"models.{index}": model for index, model in enumerate(run.plain_models())}
    if len(run.modules()) > len(run.models):
        found["criterion"] = run.plain_criterion()
    return {**found, **{f"ema.{index}": each for index, each in enumerate(run.averages)}}


def buffer_kinds(module: nn.Module) -> BufferKinds:
    """The shapes and dtypes of the persistent buffers of a module and its submodules."""
    return {
        f"{path}.{key}".lstrip("."): None if value is None else (value.shape, value.dtype)
        for path, owner in module.named_modules()
        for key, value in buffers_of(owner).items()
        if is_persistent(owner, key)
    }


def changed_buffers(module: nn.Module, first: BufferKinds) -> list[str]:
    """The names of the persistent buffers that a forward has filled, registered, grown, or replaced
    by one of another dtype.

    Args:
        first: those after `setup`.
    """
    now = buffer_kinds(module).items()
    return [name for name, kind in now if kind is not None and first.get(name) != kind]


def changes_since_setup(run: TrainingParts) -> dict[str, list[str]]:
    """What a state holds under `KEY`."""
    modules, first = labelled_modules(run), run.buffers_after_setup
    found = {label: changed_buffers(each, first[label]) for label, each in modules.items()}
    return {label: names for label, names in found.items() if names}


def changed_in(state: Mapping[str, Any], label: str) -> set[str]:
    """The names of the buffers that a forward had changed in a module when `state` was taken."""
    return set((state.get(KEY) or {}).get(label, ()))


@torch.no_grad()
def load_module(
    module: nn.Module,
    saved: Mapping[str, Any],
    *,
    first: BufferKinds,
    changed: Set[str],
    of_same_weights: bool = True,
) -> None:
    """``load_state_dict``, also for buffers that a forward has changed, there or here, and for
    those into which torch cannot write.

    Args:
        saved: a ``state_dict``, which lacks none of the buffers that `setup` has made.
        first: the buffers after `setup`.
        changed: see `changed_in`.
        of_same_weights: whether the weights there have the dtypes of those here; if so, buffers
            that were changed there have the dtypes that they have in `saved`.
    """
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    since = module.state_dict().keys() - saved.keys()
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        there = [name for name in sorted(changed & saved.keys()) if name.rpartition(".")[0] == path]
        table = {}
        for key in dict.fromkeys([*buffers_of(owner), *(name[len(prefix) :] for name in there)]):
            name, mine = prefix + key, buffers_of(owner).get(key)
            if name in since and name not in first:
                continue  # a forward has registered it
            is_empty = name in since and first[name] is None  # a forward has filled it
            made = None if name in changed else first.get(name)
            keeps_dtype = of_same_weights and name in changed
            value = None if is_empty else _value_to_put(mine, saved.get(name), made, keeps_dtype)
            table[key] = value, is_persistent(owner, key)
        _put(owner, table, replaced, device)
    module.load_state_dict(saved)


def _value_to_put(
    mine: torch.Tensor | None,
    value: Any,
    made: tuple[torch.Size, torch.dtype] | None,
    keeps_dtype: bool,
) -> torch.Tensor | None:
    """What has to be in the place of the buffer `mine` before torch can load `value`.

    Args:
        made: how `setup` makes the buffer; None if it does not, or if a forward had changed it
            there.
        keeps_dtype: whether the buffer gets the dtype of `value`.
    """
    if not isinstance(value, torch.Tensor):
        return mine
    if mine is None:
        return value
    if made is not None and value.shape not in (made[0], mine.shape):
        return mine  # the module converts the value to the shape of its buffer, or refuses it
    dtype = value.dtype if keeps_dtype else mine.dtype
    return mine if _can_write_into(mine, value) and mine.dtype == dtype else value.to(dtype)


def _can_write_into(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch can write `value` over the buffer."""
    if buffer.is_nested or value.is_nested:
        return True
    if buffer.shape != value.shape:
        return False
    if is_block(buffer) and is_block(value):
        return not is_expanded(buffer)
    # A compressed layout has memory for the numbers that it holds only.
    return buffer.layout == value.layout and buffer.layout in (torch.strided, torch.sparse_coo)
