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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from lockstep.operator.training_parts import TrainingParts

BufferValues: TypeAlias = "dict[str, tuple[torch.Tensor | None, bool]]"
"""For each buffer's name its value, and whether it is persistent."""


def buffer_values(
    run: TrainingParts, copy: Callable[[Any], Any] = lambda value: value
) -> BufferValues:
    """All buffers of the modules and of the averages of their weights.

    Args:
        copy: is given each value; by default what is returned holds the buffers themselves.
    """
    return {
        f"{path}.{key}": (None if value is None else copy(value), is_persistent(owner, key))
        for path, owner in _owners(run)
        for key, value in buffers_of(owner).items()
    }


@torch.no_grad()
def put_buffer_values(run: TrainingParts, values: BufferValues, device: torch.device) -> None:
    """Let the buffers be `values`, of a worker that has the same modules.

    Args:
        device: of buffers that `setup` has not made here.
    """
    owners = dict(_owners(run))
    for name, (value, persistent) in values.items():
        path, _, key = name.rpartition(".")
        if path not in owners:
            continue  # a module that was added since: to load its weights fails, and names them
        table = buffers_of(owners[path])
        mine = table.get(key)
        if value is None:
            table[key] = None
        elif mine is None:
            owners[path].register_buffer(key, value.to(device, copy=True), persistent)
        else:
            mine.data = value.to(mine.device, copy=True)


def _owners(run: TrainingParts) -> Iterator[tuple[str, nn.Module]]:
    for number, root in enumerate((*run.plain_modules(), *run.averages)):
        for path, owner in root.named_modules():
            yield f"{number}.{path}", owner
