# SPDX-License-Identifier: Apache-2.0
"""Which samples a rank reads, and in which order."""

from __future__ import annotations

import copy
import functools
import zlib
from collections import deque
from dataclasses import replace
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torch.utils.data import dataloader as module

from lockstep.audit.facts import MOST_INDICES, Loading
from lockstep.audit.probe.batches import (
    BATCHES,
    ROWS,
    each_row,
    hash_of,
    read_on,
    tensors_or_contents,
)
from lockstep.audit.probe.frames import users_lines
from lockstep.audit.probe.worker_draws import SeenInit, drawn_by_workers, places_of, room_for
from lockstep.dataset_contents import contents_of, identity_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

_LOADINGS: Final = 64

_shared_with_workers: Final[deque[Any]] = deque(maxlen=4 * _LOADINGS)
"""Held on to: a worker may write late, and memory that is let go is another's."""


def install(probe: Probe) -> None:
    """Watch iterations over ``DataLoader``."""
    iterator = module._BaseDataLoaderIter
    probe.patches.wrap(iterator, "__init__", probe.afterwards(_note_iterator))
    with_workers = module._MultiProcessingDataLoaderIter
    probe.patches.wrap(with_workers, "__init__", functools.partial(_start, probe))
    probe.patches.wrap(with_workers, "_reset", functools.partial(_reset, probe))
    probe.patches.wrap(iterator, "_next_index", functools.partial(_next_index, probe))
    probe.patches.wrap(iterator, "__next__", functools.partial(_next, probe))


def _note_iterator(probe: Probe, _: Any, args: Any, kwargs: Any) -> None:
    _note_beginning(probe, args[0], args[1] if len(args) > 1 else kwargs["loader"])


def _reset(
    probe: Probe,
    original: Callable[..., Any],
    iterator: Any,
    loader: DataLoader[Any],
    first_iter: bool = False,
) -> None:
    """Workers that persist have one iterator, which begins anew in every epoch."""
    if not first_iter:
        # Before: it asks for the first indices.
        probe.worker_memory.pop(iterator, None)
        probe.harmlessly(_note_beginning, probe, iterator, loader)
    original(iterator, loader, first_iter)


def _note_beginning(probe: Probe, iterator: Any, loader: DataLoader[Any]) -> None:
    probe.loading.pop(iterator, None)
    if not probe.is_on or len(probe.ledger.loadings) >= _LOADINGS:
        return
    keys = probe.known_loaders
    if loader not in keys:
        # A dataset of a loader stays; its indices may be millions.
        probe.loaders_seen += 1
        keys[loader] = Loading(
            f"{type(loader.dataset).__name__}#{probe.loaders_seen - 1}",
            where=[],
            part=_part(loader.dataset),
            contents=probe.harmlessly(_contents, loader) or [],
            dataset=probe.harmlessly(identity_of, _whole(loader.dataset)),
        )
    loading = replace(
        copy.deepcopy(keys[loader]),
        where=users_lines(),
        sampler=_sampler_name(loader),
        replicas=_replicas(loader),
        shuffles=getattr(_sampler(loader), "shuffle", None),
        size=_size(loader.dataset),
        step=probe.steps_done,
        worker_seed=int(iterator._base_seed) if loader.num_workers else None,
    )
    probe.ledger.loadings.append(loading)
    probe.loading[iterator] = loading


def _start(
    probe: Probe, original: Callable[..., Any], iterator: Any, loader: DataLoader[Any]
) -> None:
    memory = probe.harmlessly(_shared, probe, loader)
    if memory is None or "worker_init_fn" not in vars(loader):
        original(iterator, loader)
        return
    _shared_with_workers.append(memory)
    theirs: Any = vars(loader)["worker_init_fn"]
    if isinstance(theirs, SeenInit):
        theirs = theirs.original  # another thread begins with the same loader
    stand_in = SeenInit(theirs, memory)
    loader.worker_init_fn = stand_in
    try:
        original(iterator, loader)
    finally:
        loader.worker_init_fn = theirs
        if getattr(iterator, "_worker_init_fn", None) is stand_in:
            iterator._worker_init_fn = theirs
    loading = probe.loading.get(iterator)
    if loading is not None:
        loading.seeded_at = probe.harmlessly(places_of, theirs) or []
        probe.worker_memory[iterator] = memory


def _shared(probe: Probe, loader: DataLoader[Any]) -> Any:
    is_wanted = probe.is_on and len(probe.ledger.loadings) < _LOADINGS
    return RawArray("q", room_for(loader.num_workers)) if is_wanted else None


def _sampler(loader: DataLoader[Any]) -> Any:
    """What deals the samples out, or batches of them; also one that another sampler holds."""
    batches = getattr(loader, "batch_sampler", None)
    plain: Any = getattr(batches, "sampler", None)
    plain = loader.sampler if plain is None else plain  # any iterable, a list of indices too
    both = (batches, plain)
    held = [*both, *(x for of in both for x in getattr(of, "__dict__", {}).values())]
    return next((each for each in held if isinstance(each, DistributedSampler)), plain)


def _replicas(loader: DataLoader[Any]) -> int | None:
    """How many ranks share the samples, where the loader knows; Accelerate's say so too."""
    dealt = getattr(getattr(loader, "batch_sampler", None), "num_processes", None)
    replicas: int | None = getattr(_sampler(loader), "num_replicas", dealt)
    return replicas


def _sampler_name(loader: DataLoader[Any]) -> str:
    batches = getattr(loader, "batch_sampler", None)
    is_one = isinstance(batches, DistributedSampler)
    plain = (DistributedSampler if is_one else type(_sampler(loader))).__name__
    outer = type(batches).__name__ if batches is not None else ""
    return plain if outer in ("", "BatchSampler") else f"{outer}({plain})"


def _size(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _part(dataset: Any) -> int | None:
    """What stands for the samples that a ``Subset`` has of its dataset; None for others."""
    if not isinstance(dataset, Subset):
        return None
    held: Any = dataset.indices
    # A tensor's own memory is not shown to numpy: see `_numbers`.
    indices = np.asarray(held.tolist() if torch.is_tensor(held) else held, dtype=np.int64)
    return zlib.crc32(indices.tobytes(), (_part(dataset.dataset) or 0) + 1)


def _contents(loader: DataLoader[Any]) -> list[int]:
    """Of a dataset that a sampler shares out."""
    if (_replicas(loader) or 1) < 2 or isinstance(loader.dataset, Subset):
        return []
    return contents_of(loader.dataset, _size(loader.dataset))


def _whole(dataset: Any) -> Any:
    """The dataset that a ``Subset`` was taken from."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _of_the_whole(dataset: Any, index: int) -> int:
    """Which sample of the dataset that a ``Subset`` was taken from."""
    while isinstance(dataset, Subset):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    return index


def _next_index(probe: Probe, original: Callable[..., Any], iterator: Any) -> Any:
    index = original(iterator)
    loading = probe.loading.get(iterator)
    if probe.is_on and loading is not None and len(loading.indices) < MOST_INDICES:
        probe.harmlessly(_note_indices, loading, getattr(iterator, "_dataset", None), index)
    return index


def _note_indices(loading: Loading, dataset: Any, index: Any) -> None:
    together = index if isinstance(index, list | tuple) else [index]
    found = [
        int(one)
        for one in together
        if isinstance(one, int | np.integer) or (isinstance(one, torch.Tensor) and one.numel() == 1)
    ]
    loading.indices.extend(found)
    if loading.part is not None:
        loading.samples.extend(_of_the_whole(dataset, one) for one in found)
    if len(loading.batch_sizes) < BATCHES:
        # A stream is asked for as many samples, and they have no numbers.
        loading.batch_sizes.append(len(found) or len(together) * isinstance(index, list))


def _next(probe: Probe, original: Callable[..., Any], iterator: Any) -> Any:
    loading = probe.loading.get(iterator)
    try:
        batch = original(iterator)
    except StopIteration:
        if loading is not None:
            loading.has_ended = True
        if probe.given is not None:
            probe.delivered = None  # not those that the program reads first and keeps
        raise
    if loading is not None:
        loading.has_ended = probe.harmlessly(_ends_evaluation, iterator) or False
    if probe.is_on and probe.delivered is not loading:
        probe.delivered, probe.given = loading, None  # no loading: one that is not written down
    if probe.is_on and loading is not None and len(loading.batches) < BATCHES:
        probe.harmlessly(_note_batch, probe, loading, batch)
        if iterator in probe.worker_memory:
            memory = probe.worker_memory[iterator]
            loading.drawn = probe.harmlessly(drawn_by_workers, memory) or []
    return batch


def _ends_evaluation(iterator: Any) -> bool:
    """Was this the last batch of one? Loops that count (Lightning's) never ask for one more.

    Where gradients are on it may have been read ahead, by a step that fails for want of memory.
    """
    if torch.is_grad_enabled():
        return False
    try:
        return bool(iterator._num_yielded >= len(iterator))
    except (TypeError, NotImplementedError):  # a sampler or a dataset that has no length
        return False


def _note_batch(probe: Probe, loading: Loading, batch: Any) -> None:
    tensors = tensors_or_contents(batch, 4)
    if not tensors:
        return
    # Those of a nested tensor may be no plain numbers, and the ledger holds nothing else.
    loading.shapes = loading.shapes or [[int(n) for n in t.shape] for t in tensors]
    read = probe.harmlessly(functools.reduce, read_on, tensors, 0)
    loading.batches.append(hash_of(tensors) if read is None else read)
    _note_rows(loading, tensors)


def _note_rows(loading: Loading, tensors: list[torch.Tensor]) -> None:
    """What each sample of the batch held, so that indices of two ranks can be told apart."""
    number = len(loading.batches) - 1
    size = loading.batch_sizes[number] if number < len(loading.batch_sizes) else 0
    known = sum(loading.batch_sizes[:number])
    rows = [t for t in tensors if t.layout is torch.strided and t.shape[:1] == (size,)]
    if not loading.indices and len(rows) < len(tensors):
        rows = []  # of a stream that has something else beside its samples, they may be no samples
    if number == 0:
        loading.rows = [[] for _ in rows]
    # Only as long as rows and indices go side by side.
    if not size or known >= ROWS or any(len(column) != known for column in loading.rows):
        return
    for column, tensor in zip(loading.rows, rows, strict=False):
        column.extend(each_row(tensor[:ROWS]))
