# SPDX-License-Identifier: Apache-2.0
"""Ranks of one copy gather, and those of all copies add up, over one group."""

import pytest
import torch

from harness import run_ranks
from lockstep.data_parallel_mesh import DataParallelMesh
from lockstep.sync.mesh_collectives import MeshCollectives

SIZES = [(4, None), (4, 2), (6, 2), (6, 3), (5, 2)]


def on_ranks(size, dp_shard_size, body):
    def with_collectives(group):
        mesh = DataParallelMesh(group.rank, group.size, dp_shard_size)
        return body(MeshCollectives(group, mesh))

    return run_ranks(size, with_collectives)


@pytest.mark.parametrize(("size", "dp_shard_size"), SIZES)
def test_a_copy_is_gathered_from_its_own_ranks(size, dp_shard_size):
    def body(collectives):
        mesh = collectives.mesh
        mine = torch.full((3,), float(mesh.rank))
        gathered = torch.full((3 * mesh.shard_size,), -1.0)
        collectives.all_gather_into(gathered, mine)
        return gathered.view(-1, 3)[:, 0].tolist(), list(mesh.shard_ranks)

    for gathered, ranks in on_ranks(size, dp_shard_size, body):
        assert gathered == ranks


@pytest.mark.parametrize(("size", "dp_shard_size"), SIZES)
def test_gradients_of_all_ranks_are_added_up_to_the_same_bits_in_each_copy(size, dp_shard_size):
    generator = torch.Generator().manual_seed(0)
    sent = torch.randn(size, 60, generator=generator)  # float32: another order shows

    def body(collectives):
        mesh = collectives.mesh
        received = torch.empty(60 // mesh.shard_size)
        collectives.reduce_scatter(received, sent[mesh.rank].clone())
        return mesh.shard_rank, received

    results = on_ranks(size, dp_shard_size, body)
    for place, received in results:
        true = sent.double().sum(0).view(-1, len(received))[place]
        assert (received - true).abs().max() < 1e-5
        same_rows = [other for at, other in results if at == place]
        assert all(torch.equal(received, other) for other in same_rows)
