# SPDX-License-Identifier: Apache-2.0
"""What each rank copies of a state without asking the others."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from lockstep.errors import NotAvailableError
from lockstep.worker.state_dict import copy_own_rows


def test_a_part_of_a_sum_over_ranks_is_no_copy_of_it():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        norm = DTensor.from_local(torch.ones(()), DeviceMesh("cpu", [0]), [Partial()])
        with pytest.raises(NotAvailableError, match=r"part of a sum.*\n.*\n.*\n.*full_tensor"):
            copy_own_rows({"norms": [norm]})
        assert copy_own_rows([norm.full_tensor()]) == [torch.ones(())]
    finally:
        dist.destroy_process_group()
