# SPDX-License-Identifier: Apache-2.0
"""`ShardedSync` under a torch that is too old; with ranks: `tests/procs/test_units_table.py`."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import NotAvailableError
from lockstep.group import Group
from lockstep.sync.sharded_sync import ShardedSync


def test_an_older_torch_is_named(monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(NotAvailableError, match=r"got +torch 2.*\n.*torch 2\.13 or newer"):
        ShardedSync([model], Group(None), [])
