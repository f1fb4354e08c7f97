# SPDX-License-Identifier: Apache-2.0
"""Cases for `fsdp_ranks.py`: optimizers that write to parts of what they step."""

from __future__ import annotations

from tests.procs.fsdp_pairs import paired
from tests.procs.odd_optimizers import WritesToParts
from torch import nn

from harness import reset
from lockstep.errors import NotAvailableError
from lockstep.sync.fsdp import FSDPSync
from ranks.programs import X

PARTS = {
    "chunk": lambda tensor: tensor.chunk(2)[1],
    "slice": lambda tensor: tensor[1:],
    "row": lambda tensor: tensor[0],
    "row of the columns": lambda tensor: tensor.t()[:, 0],
    "split": lambda tensor: tensor.split([1, len(tensor) - 1])[0],
    "data of a slice": lambda tensor: tensor[1:].data,
    "slice of a slice": lambda tensor: tensor[1:][:1],
}


def parts_written_to(group):
    """By name: what the error says, and that the next optimizer steps as ever."""
    found = {}
    for name, part in PARTS.items():
        model = reset(nn.Linear(4, 5, bias=False).double(), 3)
        optimizer = WritesToParts(model.parameters(), part)
        sync = FSDPSync([model], group, [optimizer])
        sync.backward(model(X).square().mean(), weight=1)
        try:
            optimizer.step()
        except NotAvailableError as error:
            found[name] = str(error)
        sync.detach()
    pair = paired(group)
    pair.train()
    assert pair.apart() < 1e-12
    return found


CASES = [parts_written_to]
