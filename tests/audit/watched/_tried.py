# SPDX-License-Identifier: Apache-2.0
"""Tries a watch on one way to train, on this rank, and writes down what came of it."""

import gc
import json
import logging
import os
import sys
from pathlib import Path

from torch.nn.modules import module
from torch.optim import optimizer

import lockstep.audit
from lockstep.errors import AuditError


class _Lines(logging.Handler):
    """Keeps the first line of each record, with its level."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append([record.levelname, record.getMessage().splitlines()[0]])


def weights_of(model):
    """All of them, in a list."""
    return [number for p in model.parameters() for number in p.detach().flatten().tolist()]


def nothing_is_left():
    """The hooks have gone, and a watch can be started."""
    hooks = (
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
        module._global_forward_pre_hooks,
    )
    lockstep.audit.start()
    lockstep.audit.stop(exchange=lambda mine: [mine])
    return not any(hooks)


def try_out(train, make):
    """Train with and without a watch, rightly and wrongly, and to an exception.

    Args:
        train: ``train(watch, how)`` trains a new model to the end, and returns it; `how` is
            "right", "wrong" or "raises" (a KeyError of the program's own).
        make: makes a watch.
    """
    log, lines = logging.getLogger("lockstep"), _Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False
    found = {"without": weights_of(train(None, "right"))}
    # Trainers hold models in circles; gradients of one that has been trained would be LS402.
    gc.collect()
    watch = make()
    found["with"] = weights_of(train(watch, "right"))
    found["findings"] = [[each.code, each.severity] for each in watch.findings]
    gc.collect()
    strict = make(fail_on="error")
    try:
        train(strict, "wrong")
    except AuditError as error:
        found["raised"] = str(error)
    found["wrong"] = [each.as_dict() for each in strict.findings]
    try:
        train(strict, "raises")
    except KeyError as error:
        found["passed"] = str(error)
        found["nothing is left"] = nothing_is_left()
    found["logged"] = lines.lines
    found["world size"] = int(os.environ["WORLD_SIZE"])
    file = Path(sys.argv[1], f"rank{os.environ['RANK']}.json")
    file.write_text(json.dumps(found, default=str))
