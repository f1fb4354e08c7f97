# SPDX-License-Identifier: Apache-2.0
"""`MeshCollectives`: what the ranks of one copy of a model, and the copies, send each other.

All of it runs over the run's one group, and every rank of that takes part. Rejected: a group of
torch's for each row and column of the mesh, as HSDP has them elsewhere: where a rank is lost, each
would have to be broken and left, too, and its collectives would have to be ordered among those of
the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.data_parallel_mesh import DataParallelMesh
    from lockstep.group import Group


class MeshCollectives:
    """Collectives of the ranks of a mesh.

    Args:
        group: the ranks.
        mesh: this rank's place among them.
    """

    def __init__(self, group: Group, mesh: DataParallelMesh) -> None:
        self.group = group
        self.mesh = mesh

    def all_gather_into(self, gathered: torch.Tensor, rows: torch.Tensor) -> None:
        """Fill `gathered` with the `rows` of the ranks of this copy, by rank.

        Args:
            gathered: contiguous; as long as the `rows` of all of them.
            rows: contiguous, of one shape and dtype on every rank.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank of the group, same order. Blocks. One all-gather; where there are several
            copies, an all-to-all.

        Raises:
            PeerLostError: another rank went away.
        """
        if self.mesh.replicate_size == 1:
            self.group.all_gather_into(gathered, rows)
        else:
            self._gather_from(self.mesh.shard_ranks, gathered, rows)

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Sum the `sent` of all ranks, of all copies, and keep this rank's part of it.

        The copies get the same bits: each adds up the sums of the copies in one order.

        Args:
            received: contiguous, of one shape and dtype on every rank; overwritten.
            sent: contiguous; one part for each rank of a copy, by rank.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank of the group, same order. Blocks. One reduce-scatter; where there are several
            copies, two all-to-alls.

        Raises:
            PeerLostError: another rank went away.
        """
        mesh = self.mesh
        if mesh.replicate_size == 1:
            self.group.reduce_scatter(received, sent)
            return
        of_copy = self.exchange_parts(sent).sum(0)
        of_copies = of_copy.new_empty(mesh.replicate_size * of_copy.numel())
        self._gather_from(mesh.replicate_ranks, of_copies, of_copy)
        torch.sum(of_copies.view(mesh.replicate_size, -1), 0, out=received.view(-1))

    def exchange_parts(self, sent: torch.Tensor) -> torch.Tensor:
        """Send a part of `sent` to each rank of this copy; a row for what came from each of them.

        Args:
            sent: contiguous; one part for each rank of a copy, by rank, of one size on all ranks.

        Gradient:
            None: not differentiable.

        Collective:
            Every rank of the group, same order. Blocks. One all-to-all.

        Raises:
            PeerLostError: another rank went away.
        """
        parts = torch.empty_like(sent)
        counts = self._counts(self.mesh.shard_ranks, sent.numel() // self.mesh.shard_size)
        self.group.all_to_all(parts.view(-1), sent.view(-1), counts, counts)
        return parts.view(self.mesh.shard_size, -1)

    def _gather_from(
        self, ranks: Sequence[int], gathered: torch.Tensor, mine: torch.Tensor
    ) -> None:
        counts = self._counts(ranks, mine.numel())
        self.group.all_to_all(gathered.view(-1), mine.view(-1).repeat(len(ranks)), counts, counts)

    def _counts(self, ranks: Sequence[int], each: int) -> list[int]:
        return [each if rank in ranks else 0 for rank in range(self.group.size)]
