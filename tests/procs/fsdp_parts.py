# SPDX-License-Identifier: Apache-2.0
"""Cases for `fsdp_ranks.py`: optimizers that write to parts of what they step."""

from __future__ import annotations

import copy

from tests.procs.fsdp_pairs import paired
from tests.procs.odd_optimizers import Draws, DrawsByValues, OfColumns, WritesToParts
from torch import nn

from harness import reset
from lockstep.errors import NotAvailableError
from lockstep.local_rows import LocalRows
from lockstep.sync.fsdp import FSDPSync
from lockstep.sync.optimizer_inspection import load_state
from lockstep.tensor_tree import leaves_of
from lockstep.worker.state_dict import copy_own_rows
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


def columns_there_and_back(group):
    """What is not in rows on its own: as a step left it, and as a part of a checkpoint has it."""
    pair = paired(group, OfColumns)
    pair.train(3)
    rows = copy_own_rows(pair.optimizer.state_dict())
    saved = [leaf for leaf in leaves_of(rows["state"]) if isinstance(leaf, LocalRows)]
    assert len(saved) == 4  # of two matrices
    weights = copy.deepcopy(pair.model.state_dict())
    truth = copy.deepcopy(pair.true_optimizer.state_dict())
    apart = pair.apart()
    pair.sync.detach()
    fresh = paired(group, OfColumns)
    for model, optimizer, state in zip(
        (fresh.model, fresh.truth),
        (fresh.optimizer, fresh.true_optimizer),
        (rows, truth),
        strict=True,
    ):
        model.load_state_dict(weights)
        load_state(optimizer, copy.deepcopy(state))
    fresh.train(3)
    return max(apart, fresh.apart())


def drawn_in_a_step(group):
    pair = paired(group, Draws)
    pair.train()
    return pair.apart()


def drawn_by_values(group):
    pair = paired(group, DrawsByValues)
    pair.train(1)


SAME = [columns_there_and_back, drawn_in_a_step]

CODES = {drawn_by_values: "LS003"}

CASES = [parts_written_to, *SAME, *CODES]
