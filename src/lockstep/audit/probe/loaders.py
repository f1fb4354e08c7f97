# SPDX-License-Identifier: Apache-2.0
"""Which samples a rank reads, and in which order."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as module

from lockstep.audit.fingerprint import take
from lockstep.audit.ledger import Loading
from lockstep.audit.probe.frames import users_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

_INDICES: Final = 20_000
_BATCHES: Final = 64
_LOADINGS: Final = 64


def install(probe: Probe) -> None:
    """Watch iterations over ``DataLoader`` in this process; its workers are left alone."""
    iterator = module._BaseDataLoaderIter
    probe.patches.wrap(iterator, "__init__", functools.partial(_beginner, probe))
    probe.patches.wrap(iterator, "_next_index", functools.partial(_indexer, probe))
    probe.patches.wrap(iterator, "__next__", functools.partial(_deliverer, probe))


def _beginner(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: Any, loader: DataLoader[Any]) -> None:
        original(self, loader)
        keys = probe.loader_keys
        if loader not in keys:
            keys[loader] = f"{type(loader.dataset).__name__}#{len(keys)}"
        key = keys[loader]
        epoch = sum(1 for known in probe.ledger.loadings if known.key == key)
        if len(probe.ledger.loadings) >= _LOADINGS:
            return
        loading = Loading(
            key,
            epoch,
            users_lines(),
            sampler=_sampler_name(loader),
            size=_size(loader.dataset),
            worker_seed=int(self._base_seed) if loader.num_workers else None,
            workers=loader.num_workers,
        )
        probe.ledger.loadings.append(loading)
        probe.loading[self] = loading

    return watched


def _sampler_name(loader: DataLoader[Any]) -> str:
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None) or loader.sampler
    plain = type(sampler).__name__
    outer = type(batches).__name__ if batches is not None else ""
    return plain if outer in ("", "BatchSampler") else f"{outer}({plain})"


def _size(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _indexer(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: Any) -> Any:
        index = original(self)
        loading = probe.loading.get(self)
        if loading is not None and len(loading.indices) < _INDICES:
            for one in index if isinstance(index, list | tuple) else [index]:
                if isinstance(one, int | np.integer) or (
                    isinstance(one, torch.Tensor) and one.numel() == 1
                ):
                    loading.indices.append(int(one))
        return index

    return watched


def _deliverer(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: Any) -> Any:
        batch = original(self)
        loading = probe.loading.get(self)
        if loading is not None and len(loading.batches) < _BATCHES:
            tensors = tensors_in(batch, 4)
            if tensors:
                held = take(tensors, [0] * len(tensors))
                loading.batches.append(int(np.bitwise_xor.reduce(held.hashes)))
            probe.delivered = loading
        return batch

    return watched


def tensors_in(batch: Any, most: int) -> list[torch.Tensor]:
    """The first tensors of a batch, however it is nested."""
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.numel() else []
    parts = batch.values() if isinstance(batch, dict) else batch
    found: list[torch.Tensor] = []
    if isinstance(batch, dict | list | tuple):
        for part in parts:
            if len(found) < most:
                found.extend(tensors_in(part, most - len(found)))
    return found
