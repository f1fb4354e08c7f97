# SPDX-License-Identifier: Apache-2.0
"""Checks, before the first step, that all ranks read the data by the same plan.

Each rank builds its own loader in its own process. Where a dataset lists its files in another
order, a sampler is seeded from the clock, a batch size depends on the rank, or a stream already
reads this rank's part only, samples would be lost or read twice, and no gradient would show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lockstep.content_digest import content_digest
from lockstep.data.shard_batch_size import ShardBatchSize
from lockstep.dataset_contents import held_contents
from lockstep.errors import DataOrderError
from lockstep.held_columns import tensors_of
from lockstep.tensor_tree import PLAIN_TYPES, children_of, is_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.data.global_batches import GlobalBatch, GlobalBatches
    from lockstep.data.shard_assignment import ShardAssignment

_CHECKED_FIELDS: Final = {
    "kind": ("kinds of loaders", "setup builds another loader on some ranks"),
    "length": ("lengths of the data", "the ranks see different files, or split them themselves"),
    "global_batch": (
        "global batch sizes",
        "batch_size depends on the rank; note that config[BATCH_SIZE] keeps the whole through "
        "* and // only",
    ),
    "drop_last": ("settings of drop_last", "setup builds another loader on some ranks"),
    "dataset": (
        "datasets",
        "the ranks list files in no fixed order, or split or draw the samples with a generator"
        " that is seeded per process",
    ),
    "num_shards": ("numbers of shards", "the ranks were started with different arguments"),
    "seed": ("seeds", "the ranks were started with different arguments"),
    "epoch": ("epochs", "some ranks iterated the loader more often than others"),
    "first_batch": (
        "first global batches",
        "a sampler or stream that is seeded per process, depends on the rank, or lists files "
        "in no fixed order; or an order that depends on how often it was read, and a worker has "
        "joined that has read it less often: derive it from the epoch, in set_epoch",
    ),
}


def plan_fingerprint(
    batches: GlobalBatches,
    first: GlobalBatch | None,
    dataset: Any,
    assignment: ShardAssignment,
    epoch: int,
) -> dict[str, Any]:
    """The plan of an epoch as plain JSON, equal on ranks that read by the same plan.

    Args:
        first: the first global batch of the epoch; None if there is none.
        dataset: what the loader reads from; None where the items are the batches.
    """
    return {
        "kind": batches.kind.value,
        "length": batches.length,
        "global_batch": batches.per_step,
        "drop_last": batches.drop_last,
        # What the positions stand for; of a stream the first sample tells.
        "dataset": None if batches.kind.is_data else content_digest(held_contents(dataset)),
        "num_shards": assignment.num_shards,
        "seed": assignment.seed,
        "epoch": epoch,
        "share": _share_held_by(batches.source),
        "first_batch": _digest_of_first_batch(first, batches),
    }


def _share_held_by(sampler: Any) -> list[int] | None:
    """``config[BATCH_SIZE]`` as `sampler` has got it: the share of its shard, and of how much.

    None where an attribute holds no such number. A sampler that makes batches itself, of its rank's
    share, makes the same batches on every rank only if the shares are equal.
    """
    held = getattr(sampler, "__dict__", {}).values()
    return next(([int(v), v.whole] for v in held if isinstance(v, ShardBatchSize)), None)


def _digest_of_first_batch(first: GlobalBatch | None, batches: GlobalBatches) -> str | None:
    if first is None:
        return None
    # Of a stream of samples, hash one sample only: it shows a stream that is already split by rank,
    # and the rest of the batch need not be loaded. Of a sampler, hash all indices.
    if not batches.kind.is_data:
        return content_digest(first.items(0, len(first)))
    return content_digest([_told_by(item) for item in first.items(0, 1)])


def _told_by(item: Any) -> Any:
    """What of an item of a stream is the same on each rank that reads the same stream.

    Of an object of the program's its tensors and arrays: other attributes may be an id drawn at
    random, a time, or the rank.
    """
    if isinstance(item, torch.Tensor) and item.is_nested:
        return [_told_by(part) for part in item.unbind()]
    if isinstance(item, (*PLAIN_TYPES, torch.Tensor, np.ndarray)) or is_rows(item):
        return item
    if isinstance(item, PurePath):
        return item.name  # each host may have its copy elsewhere
    children = children_of(item)
    if children is None:
        return [type(item).__name__, *tensors_of(item)]
    return {str(key): _told_by(child) for key, child in children}


def check_same_plan(fingerprints: Sequence[Mapping[str, Any]]) -> None:
    """Raise an error unless all ranks read by the same plan.

    Args:
        fingerprints: one per rank, in rank order, from `plan_fingerprint`.

    Raises:
        DataOrderError: the plans differ; the message names the first difference and its ranks.
    """
    odd = [rank for rank, other in enumerate(fingerprints) if not isinstance(other, Mapping)]
    if odd:
        raise DataOrderError(
            "the ranks are at different places: some begin a pass over the data, others do not",
            where=f"rank(s) {', '.join(map(str, odd))} are elsewhere",
            cause="a loop left out a step, or ran one more, on some ranks",
            fix="the same steps on every rank (a guard against NaN has to decide for all of them)",
        )
    first = fingerprints[0]
    for key, (words, cause) in _CHECKED_FIELDS.items():
        values = [fingerprint.get(key) for fingerprint in fingerprints]
        odd = [rank for rank, value in enumerate(values) if value != first.get(key)]
        if odd:
            raise DataOrderError(
                f"the ranks read their data by different {words}",
                where=f"rank(s) {', '.join(map(str, odd))} against rank 0",
                expected=f"{key} {first.get(key)} on every rank",
                got=", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values)),
                **_cause_and_fix(fingerprints, key, cause),
            )


def _cause_and_fix(
    fingerprints: Sequence[Mapping[str, Any]], key: str, cause: str
) -> dict[str, str]:
    """Why plans differ in `key`, and what to do; `cause` unless the ranks' shares show it."""
    shares = [each["share"] for each in fingerprints if each.get("share") is not None]
    is_shown = key in ("length", "first_batch") and len(shares) == len(fingerprints)
    if not is_shown or all(share == shares[0] for share in shares):
        return {
            "cause": cause,
            "fix": "build the same loader over the same data on every rank; lockstep gives "
            "each its part",
        }
    whole = shares[0][1]
    sizes = ", ".join(f"{size} on rank {rank}" for rank, (size, _) in enumerate(shares))
    return {
        "cause": f"a sampler makes batches of config[BATCH_SIZE] itself, and {whole} samples do not"
        f" divide by the shards: {sizes}",
        "fix": "config[BATCH_SIZE].whole // num_shards as the sampler's batch size, or a global"
        " batch size that divides by the number of shards",
    }
