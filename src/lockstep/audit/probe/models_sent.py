# SPDX-License-Identifier: Apache-2.0
"""Messages as large as a model that an optimizer holds: weights of its own that a rank tells.

Elastic averaging, consensus methods, codistillation and swapped models keep a model on each rank
that is like no other's, and tell one another about them every few steps. ``isend`` is watched in
the process group: torch compares the function itself by identity.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe, Watched

FACT: Final = "models_sent"
REDUCING: Final = ("all_reduce", "reduce")
TELLING: Final = (*REDUCING, "all_gather", "all_gather_into_tensor")
_MOST: Final = 4
"""Times the model: with two moments for each weight, say."""
_KEPT: Final = 64
_SAME: Final = 1e-5


def install(probe: Probe) -> None:
    """Watch what one rank sends to another."""
    group = dist.ProcessGroup
    probe.patches.wrap(group, "send", functools.partial(_sender, probe))


def _sender(probe: Probe, original: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if probe.is_on and not probe.in_backward and not probe.is_elsewhere():
            for tensor in tensors:
                probe.harmlessly(note, probe, "send", tensor)
        return original(self, tensors, *args, **kwargs)

    return watched


def note(probe: Probe, op: str, tensor: torch.Tensor) -> None:
    """Keep it, if it is as large as what an optimizer of modules holds."""
    noted = probe.ledger.facts.get(FACT, [])
    size = tensor.numel()
    if size < 2 or len(noted) >= _KEPT or not tensor.is_floating_point():
        return
    for watched in probe.optimizers.values():
        held = sum(math.prod(p.shape) for p in watched.track.parameters)
        if held > 1 and size % held == 0 and size <= _MOST * held:
            plain = op in REDUCING and _are_weights(watched, tensor)
            noted.append({"size": held, "plain": plain})
            probe.ledger.facts[FACT] = noted
            return


def _are_weights(watched: Watched, tensor: torch.Tensor) -> bool:
    """Is it what the optimizer holds, unchanged? Their mean would be the model of all ranks."""
    with torch.no_grad():
        norms = [float(p.detach().double().norm()) for p in watched.parameters]
        weights = math.sqrt(sum(norm**2 for norm in norms))
        return abs(float(tensor.double().norm()) - weights) <= _SAME * weights
