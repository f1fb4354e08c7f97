# SPDX-License-Identifier: Apache-2.0
"""What an operation of autograd's graph keeps for its backward.

Only what it keeps itself. Where the program packs saved tensors by hooks, to read one is to unpack
it: with ``torch.utils.checkpoint`` a whole forward runs again, and what that draws, counts or
communicates happens once more.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

_RAW: Final = "_raw_saved_"


def saved(node: Any, name: str) -> Any:
    """What `node` keeps under `name`; None if there is nothing, or if the program has packed it."""
    return None if _is_packed(node, name) else getattr(node, f"_saved_{name}", None)


def each_saved(node: Any) -> Iterator[torch.Tensor]:
    """All tensors that `node` keeps, and has not packed."""
    kind: Any = type(node)
    for name in _names(kind):
        held = saved(node, name)
        for tensor in held if isinstance(held, tuple | list) else (held,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


@functools.lru_cache(maxsize=512)
def _names(kind: Hashable) -> tuple[str, ...]:
    """By the type of the operation: there are few of them, and many operations."""
    return tuple(n.removeprefix(_RAW) for n in dir(kind) if n.startswith(_RAW))


def _is_packed(node: Any, name: str) -> bool:
    raw = getattr(node, _RAW + name, None)
    parts = raw if isinstance(raw, tuple | list) else (raw,)
    return any(getattr(part, "unpack_hook", None) is not None for part in parts)
