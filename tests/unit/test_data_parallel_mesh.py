# SPDX-License-Identifier: Apache-2.0
"""Over which ranks a copy of a model is sharded, and which have the same rows."""

import pytest

from lockstep.data_parallel_mesh import DataParallelMesh


@pytest.mark.parametrize(
    ("size", "asked", "shard_size"),
    [(4, None, 4), (4, 2, 2), (6, 2, 2), (6, 3, 3), (5, 2, 5), (3, 2, 3), (1, 2, 1), (4, 4, 4)],
)
def test_every_rank_has_a_place_of_its_own(size, asked, shard_size):
    meshes = [DataParallelMesh(rank, size, asked) for rank in range(size)]
    assert {mesh.shard_size for mesh in meshes} == {shard_size}
    assert all(mesh.replicate_size * shard_size == size for mesh in meshes)
    places = [(mesh.replicate_rank, mesh.shard_rank) for mesh in meshes]
    copies = range(size // shard_size)
    assert places == [(copy, place) for copy in copies for place in range(shard_size)]
    for rank, mesh in enumerate(meshes):
        assert rank in mesh.shard_ranks
        assert rank in mesh.replicate_ranks
        same_copy = [other for other, (copy, _) in enumerate(places) if copy == places[rank][0]]
        same_rows = [other for other, (_, place) in enumerate(places) if place == places[rank][1]]
        assert list(mesh.shard_ranks) == same_copy
        assert list(mesh.replicate_ranks) == same_rows
    assert [rank for copy in meshes[0].copies for rank in copy] == list(range(size))
