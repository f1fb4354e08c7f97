# SPDX-License-Identifier: Apache-2.0
"""What torch does not document of the iterators of a ``DataLoader`` with worker processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def forget_iterator(loader: DataLoader[Any]) -> Any:
    """Take from a loader its iterator with persistent workers, or None. Torch 2.6 to 2.13."""
    iterator = loader._iterator
    vars(loader)["_iterator"] = None
    return iterator


def has_lost_process(loader: DataLoader[Any]) -> bool:
    """Whether a process has ended of those that a loader with ``persistent_workers`` keeps.

    Torch 2.6 to 2.13. The loader itself would wait for it, and raise, at each iteration.
    """
    iterator: Any = loader._iterator
    kept = () if iterator is None else vars(iterator).get("_workers", ())
    return not all(process.is_alive() for process in kept)


def shut_down(iterator: Any) -> None:
    """End a loader iterator's processes now, also while a traceback still refers to it.

    Torch 2.6 to 2.13. Publicly: drop the last reference. Other packages' iterators have ``close``.
    """
    end = getattr(iterator, "_shutdown_workers", None) or getattr(iterator, "close", None)
    if callable(end):
        end()
