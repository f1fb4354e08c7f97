# SPDX-License-Identifier: Apache-2.0
"""What a rank writes down, made by hand."""

import numpy as np

from lockstep.audit.facts import Parameter, Step, Track
from lockstep.audit.ledger import Ledger
from lockstep.audit.prints import Fingerprint


def of_one_step(rank, norm, kept=2, world_size=2):
    """Of a rank that kept so many elements of one parameter, whose gradient had that norm."""
    held = Fingerprint(np.array([int(norm)]), np.array([norm]), norm * np.arange(1.0, kept + 1))
    track = Track("SGD#0", "SGD", [], [Parameter("weight", [99], "float32", samples=kept)])
    track.steps = [Step(0, [], entry=held, gradients=held, exit=held)]
    track.count = 1
    return Ledger(rank=rank, world_size=world_size, tracks=[track], started_group=True)
