# SPDX-License-Identifier: Apache-2.0
"""`ShardBatch`: the part of a global batch that one shard computes, with its origin and seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.randomness import derive_seed, seed_all

if TYPE_CHECKING:
    from lockstep.data import LoadedPart
    from lockstep.errors import WeightError


class BatchOrigin(NamedTuple):
    """The place in the data from which a part of a global batch was read.

    Attributes:
        epoch: passes over the data before it.
        step: the number of the global batch in its epoch, from 0.
        indices: of its samples in the dataset, from the sampler; empty without a sampler.
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
        num_samples: samples in it that count; 0 for a borrowed batch, see
            `lockstep.data.sharded_loader`.
        seed: seeds every global generator before the batch is computed on; None: they go on.
        shard: the number of the shard; of the first one, if the batch holds several.
        origin: epoch, step and samples of the batch; None for a batch that no worker delivered.
        miscount: see `lockstep.data.LoadedPart`.
    """

    batch: Any
    num_samples: int
    seed: int | None
    shard: int = 0
    origin: BatchOrigin | None = None
    miscount: WeightError | None = None

    @classmethod
    def of(cls, part: LoadedPart, run_seed: int, purpose: str, epoch: int, step: int) -> ShardBatch:
        """A part of global batch `step` of an epoch, with the random numbers of its shard.

        Args:
            part: as the loader has read it; without a shard if its samples are no shard's.
            run_seed: the trainer's.
            purpose: see `GlobalBatchContext`.
            epoch: passes over the data before.
            step: number of the global batch in its epoch.
        """
        shard = part.shards[0] if part.shards else -1
        seed = derive_seed(run_seed, purpose, epoch, step, shard)
        origin = BatchOrigin(epoch, step, part.indices)
        return cls(part.batch, part.num_samples, seed, shard, origin, part.miscount)

    @property
    def is_borrowed(self) -> bool:
        return self.num_samples == 0

    def seed_randomness(self) -> None:
        if self.seed is not None:
            seed_all(self.seed)
