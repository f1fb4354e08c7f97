# SPDX-License-Identifier: Apache-2.0
"""Rows that travel from rank to rank by ``batch_isend_irecv``, as in a ring.

``isend`` and ``irecv`` themselves are left alone: torch compares them by identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lockstep.audit.facts import Collective
from lockstep.audit.probe import gathers
from lockstep.audit.probe.collectives import ranks_of
from lockstep.audit.probe.frames import users_lines

if TYPE_CHECKING:
    from lockstep.audit.probe.probe import Probe

NAME = "batch_isend_irecv"


def install(probe: Probe) -> None:
    """Watch exchanges between two ranks."""
    modules = (dist.distributed_c10d, dist)
    probe.patches.wrap_in_each(modules, NAME, probe.afterwards(_note))


def _note(probe: Probe, _: Any, args: Any, kwargs: Any) -> None:
    if not probe.is_on or not probe.detailed or probe.is_elsewhere():
        return
    operations: list[Any] = args[0] if args else kwargs.get("p2p_op_list", [])
    sent = [o.tensor for o in operations if o.op.__name__ == "isend"]
    received = [o.tensor for o in operations if o.op.__name__ == "irecv"]
    call = Collective(NAME, users_lines(), ranks_of(operations[0].group if operations else None))
    call.in_backward = probe.in_backward
    # Not counted among a rank's calls: two ranks exchange, and others do not.
    probe.remember("collectives", call)
    gathers.note_exchange(probe, call, sent, received, is_there=False)
