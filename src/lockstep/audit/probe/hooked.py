# SPDX-License-Identifier: Apache-2.0
"""What hooks on parameters make of gradients before a wrapper reduces them.

A program's ``parameter.register_hook`` is given this rank's gradient, and the wrapper what it gives
back. Two hooks more, one before and one behind the program's, see both; they are there for one
backward. Two things are told apart from all others: a factor, and a limit for each element.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.audit.probe.optimizers import CLOSELY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.audit.ledger import Backward
    from lockstep.audit.probe.probe import Probe

_PARAMETERS: Final = 64
_ELEMENTS: Final = 4096
_CLOSE: Final = 1e-5


@contextmanager
def watched_hooks(probe: Probe, record: Backward) -> Iterator[None]:
    """Within it, `record` gets to know what the hooks on wrapped parameters do."""
    undo: list[tuple[dict[int, Any], list[int]]] = []
    probe.harmlessly(_hook_in, probe, record, undo)
    try:
        yield
    finally:
        for hooks, ours in undo:
            for known in ours:
                hooks.pop(known, None)


def _hook_in(probe: Probe, record: Backward, undo: list[tuple[dict[int, Any], list[int]]]) -> None:
    for watched in probe.optimizers.values():
        if watched.track.count >= CLOSELY:
            continue
        for param, described in zip(watched.parameters, watched.track.parameters, strict=True):
            hooks = param._backward_hooks
            watched_here = hooks and described.wrapper and param.requires_grad
            # A table of another type belongs to a synchronisation that runs the hooks itself,
            # after it has reduced.
            if watched_here and type(hooks) is OrderedDict and len(undo) < _PARAMETERS:
                undo.append((hooks, _around(probe, record, described.name, param)))


def _around(probe: Probe, record: Backward, name: str, param: torch.Tensor) -> list[int]:
    """Put a hook before and one behind those that `param` has; their keys."""
    given: list[torch.Tensor] = []

    def before(gradient: torch.Tensor) -> None:
        given[:] = [probe.harmlessly(_some, gradient)]

    def behind(gradient: torch.Tensor) -> None:
        if given:
            probe.harmlessly(_compare, record, name, given.pop(), gradient)

    hooks = param._backward_hooks
    assert hooks is not None
    theirs = dict(hooks)
    keys = [param.register_hook(before).id, param.register_hook(behind).id]
    first = hooks.pop(keys[0])
    # Called in the order in which they were put in, which `move_to_end` does not change.
    for known in theirs:
        del hooks[known]
    last = hooks.pop(keys[1])
    hooks.update({keys[0]: first, **theirs, keys[1]: last})
    return keys


def _some(gradient: torch.Tensor) -> torch.Tensor | None:
    if gradient.layout is not torch.strided:
        return None
    return gradient.detach().reshape(-1)[:_ELEMENTS].clone()


def _compare(
    record: Backward, name: str, given: torch.Tensor | None, gradient: torch.Tensor
) -> None:
    left = _some(gradient)
    if given is None or left is None or given.shape != left.shape:
        return
    if not torch.isfinite(given).all() or not given.any() or not left.any():
        return
    limit = float(left.abs().max())
    factor = float(left.double() @ given.double()) / float(given.double() @ given.double())
    if float((factor * given - left).abs().max()) <= _CLOSE * limit:
        record.hooked[name] = {"factor": factor}
    elif float((given.clamp(-limit, limit) - left).abs().max()) <= _CLOSE * limit:
        record.hooked[name] = {"limit": limit}
