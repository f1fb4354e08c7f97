# SPDX-License-Identifier: Apache-2.0
"""The buffers of a run by name, for a worker whose `setup` has made others.

A forward may fill a buffer that is None, register one, or put one of another shape in its place, as
tables of positions do that grow with the longest text. No ``load_state_dict`` takes the values of
such a buffer, and those that are not persistent are in no ``state_dict``. So a worker puts buffers
in place before it loads a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lockstep._torch_compat import buffers_of, is_persistent
from lockstep.sync import is_local_buffer
from lockstep.tensor_copies import fits, is_expanded, write_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lockstep.operator.training_parts import TrainingParts

BufferValues: TypeAlias = "dict[str, dict[str, tuple[torch.Tensor | None, bool]]]"
"""For each module's path, and for each name of a buffer of it: the value, and whether the buffer is
persistent."""


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
    # Modules that share a buffer go on sharing it.
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for path, owner in _owners(run):
        # Without values: a module that was added since.
        table = values.get(path, buffers_of(owner))
        for key in buffers_of(owner).keys() - table.keys():
            delattr(owner, key)  # a forward has registered it
        for key, (value, persistent) in values.get(path, {}).items():
            mine = buffers_of(owner).get(key)
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
