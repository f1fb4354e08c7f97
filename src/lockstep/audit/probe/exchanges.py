# SPDX-License-Identifier: Apache-2.0
"""Rows that travel from rank to rank by ``batch_isend_irecv``, as in a ring.

``isend`` and ``irecv`` themselves are left alone: torch compares them by identity.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lockstep.audit.facts import Collective
from lockstep.audit.probe import gathers
from lockstep.audit.probe.collectives import note_in_windows, ranks_of
from lockstep.audit.probe.frames import users_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe

NAME = "batch_isend_irecv"


def install(probe: Probe) -> None:
    """Watch exchanges between two ranks."""
    modules = (dist.distributed_c10d, dist)
    probe.patches.wrap_in_each(modules, NAME, functools.partial(_watcher, probe))


def _watcher(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        requests = original(*args, **kwargs)
        if probe.is_on and probe.detailed and not probe.is_elsewhere():
            operations = args[0] if args else kwargs.get("p2p_op_list", [])
            probe.harmlessly(_note, probe, operations)
        return requests

    return watched


def _note(probe: Probe, operations: list[Any]) -> None:
    sent = [o.tensor for o in operations if o.op.__name__ == "isend"]
    received = [o.tensor for o in operations if o.op.__name__ == "irecv"]
    call = Collective(NAME, users_lines(), ranks_of(operations[0].group if operations else None))
    call.in_backward = probe.in_backward
    # Not counted among a rank's calls: two ranks exchange, and others do not.
    note_in_windows(probe, call)
    gathers.note_exchange(probe, call, sent, received, is_there=False)
