# SPDX-License-Identifier: Apache-2.0
"""The steps of a streamed dataset, and what each counts for, without Ray.

`lockstep.data.ray_dataset`, over the batches that a `collate_fn` makes.
"""

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from harness import run_ranks
from lockstep.data import RayBatches, RayDatasetShard, ShardAssignment


class Rows:
    """Stands for an iterator of `ray.data`: blocks of rows, collated as Ray does it."""

    def __init__(self, *blocks):
        self.blocks = blocks

    def iter_torch_batches(self, *, collate_fn=None, **options):
        for block in self.blocks:
            columns = {"id": np.array(block)}
            yield {"id": torch.tensor(block)} if collate_fn is None else collate_fn(columns)


def steps_of(blocks_by_rank, collate_fn, *, joint=False):
    """By rank and step: the samples of this rank, and those of all."""

    def body(group):
        size = len(blocks_by_rank)
        shard = RayDatasetShard(
            Rows(*blocks_by_rank[group.rank]),
            RayBatches(None, batch_size=4 * size, collate_fn=collate_fn),
            ShardAssignment(size, range(group.rank, group.rank + 1), 0),
            group,
            joint=joint,
        )
        return [
            (step.index, sum(part.num_samples for part in step.parts), step.num_samples)
            for step in shard.batches(0)
        ]

    return run_ranks(len(blocks_by_rank), body)


def sequences(columns):
    return [torch.ones(2 + int(number), 3) for number in columns["id"]]


@pytest.mark.parametrize(
    "collate_fn",
    [
        sequences,
        lambda columns: {"s": sequences(columns), "size": (5, 5)},
        lambda columns: pack_sequence(sequences(columns), enforce_sorted=False),
        lambda columns: (torch.ones(9, len(columns["id"]), 2), torch.ones(len(columns["id"]))),
        lambda columns: object(),
        None,
    ],
)
def test_a_batch_counts_for_its_rows_however_it_is_collated(collate_fn):
    """A list of sequences counted for the steps of the first."""
    first, second = steps_of([[[7, 1, 2, 3], [4, 5]], [[6, 0, 3]]], collate_fn)
    assert first == [(0, 4, 7), (1, 2, 2)]
    assert second == [(0, 3, 7), (1, 0, 2)]


def large(columns):
    return {"id": torch.as_tensor(columns["id"][columns["id"] > 9])}


@pytest.mark.parametrize("joint", [False, True])
def test_a_batch_that_the_collate_fn_has_emptied_everywhere_does_not_end_the_pass(joint):
    """The rows behind it were left out."""
    first, second = steps_of([[[10, 1], [2, 3], [11, 12]], [[13], [4]]], large, joint=joint)
    assert first == [(0, 1, 2), (1, 2, 2)]
    assert second == [(0, 1, 2), (1, 0, 2)]


def test_a_stream_of_one_worker_goes_on_behind_an_emptied_batch():
    (steps,) = steps_of([[[1, 2], [10, 11], [3], [12]]], large)
    assert steps == [(0, 2, 2), (1, 1, 1)]
    (steps,) = steps_of([[[1, 2], [10, 11]]], lambda columns: None)
    assert steps == []
