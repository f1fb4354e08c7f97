# SPDX-License-Identifier: Apache-2.0
"""What DTensor asks of a copy's group comes from the ranks of the copy, and from no others."""

import pytest
import torch
import torch.distributed as dist
from tests.unit.sync.test_mesh_collectives import on_ranks

from lockstep.errors import NotAvailableError
from lockstep.sync.copy_collectives import run_in_copy

OF = [1.0, 2.0, 5.0, 7.0]
"""What each of four ranks brings."""


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (dist.ReduceOp.SUM, (3.0, 12.0)),
        (dist.ReduceOp.AVG, (1.5, 6.0)),
        (dist.ReduceOp.PRODUCT, (2.0, 35.0)),
        (dist.ReduceOp.MAX, (2.0, 7.0)),
        (dist.ReduceOp.MIN, (1.0, 5.0)),
    ],
)
def test_all_reduce_and_reduce_scatter(operation, expected):
    def body(collectives):
        rank = collectives.mesh.rank
        whole = torch.full((2, 3), OF[rank])
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        run_in_copy(collectives, "allreduce", ([whole], options)).wait()
        received, scattering = torch.empty(3), dist.ReduceScatterOptions()
        scattering.reduceOp = operation
        sent = torch.full((2, 3), OF[rank])
        run_in_copy(collectives, "_reduce_scatter_base", (received, sent, scattering)).wait()
        return whole, received

    for rank, (whole, received) in enumerate(on_ranks(4, 2, body)):
        assert (whole == expected[rank // 2]).all()
        assert (received == expected[rank // 2]).all()


def test_all_gathers():
    def body(collectives):
        mine, gathered = torch.tensor([OF[collectives.mesh.rank]]), torch.empty(2)
        run_in_copy(collectives, "_allgather_base", (gathered, mine, None))
        several = [torch.empty(2), torch.empty(4)]
        given = [mine, torch.cat([mine, mine])]
        run_in_copy(collectives, "allgather_into_tensor_coalesced", (several, given, None))
        return gathered.tolist(), several[1].tolist()

    for rank, (gathered, several) in enumerate(on_ranks(4, 2, body)):
        assert gathered == OF[2 * (rank // 2) :][:2]
        assert several == sorted(2 * gathered)


def test_others_are_refused_by_name():
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.BAND

    def body(collectives):
        with pytest.raises(NotAvailableError, match="torch's barrier"):
            run_in_copy(collectives, "barrier", ())
        with pytest.raises(NotAvailableError, match="a reduction by"):
            run_in_copy(collectives, "allreduce", ([torch.ones(1)], options))

    on_ranks(4, 2, body)
