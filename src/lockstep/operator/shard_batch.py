# SPDX-License-Identifier: Apache-2.0
"""A shard of a global batch as the worker delivers it: samples, weight and random numbers.

An operator that leaves `train_batch` to lockstep computes the shards that its worker carries one
after the other, so that the arithmetic of a shard does not depend on which worker carries it. An
operator with its own loop gets the samples of all its worker's shards as one plain batch, which
then counts as one shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lockstep.randomness import seed_all
from lockstep.tensor_tree import children_of, rebuilt


class BatchOrigin(NamedTuple):
    """Where a part of a global batch was read.

    Attributes:
        epoch: passes over the data before it.
        step: the number of the global batch in its epoch, from 0.
        indices: what the sampler gave for its samples; empty without a sampler.
    """

    epoch: int
    step: int
    indices: tuple[Any, ...]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.indices[:8]))
        more = f", ... {len(self.indices)} in all" if len(self.indices) > 8 else ""
        samples = f"dataset[{shown}{more}], " if shown else ""
        return f"{samples}global batch {self.step} of epoch {self.epoch}"


@dataclass(frozen=True)
class ShardBatch:
    """One shard of a global batch, or all of a worker's shards as one plain batch.

    Attributes:
        batch: what the user's loader collated.
        num_samples: samples in it that count; 0 for a borrowed batch, which only keeps a
            worker without samples in step with its peers.
        seed: seeds every global generator before the batch is computed on.
        shard: whose samples these are; the first one's, if they are those of several.
        origin: where it was read; None for a batch that no worker delivered.
    """

    batch: Any
    num_samples: int
    seed: int
    shard: int = 0
    origin: BatchOrigin | None = None

    @property
    def is_borrowed(self) -> bool:
        return self.num_samples == 0

    def seed_randomness(self) -> None:
        seed_all(self.seed)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with every tensor on `device`.

    Follows mappings, lists, tuples and dataclasses; anything else that has a `.to` (a
    `BatchEncoding`, a `PackedSequence`, a graph batch) is asked itself; the rest (strings,
    numbers, None) is returned as it is.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if type(batch) in (list, tuple):  # the common case, before slower questions
        return type(batch)(to_device(child, device) for child in batch)
    # Before containers: a BatchEncoding is a mapping whose own `.to` keeps its class.
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    children = children_of(batch)
    if children is None:
        return batch
    return rebuilt(batch, [to_device(child, device) for _, child in children])
