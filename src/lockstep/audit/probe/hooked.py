# SPDX-License-Identifier: Apache-2.0
"""What hooks on parameters make of gradients before a wrapper reduces them.

A program's ``parameter.register_hook`` is given this rank's gradient, and the wrapper what it gives
back. Two hooks more, one before and one behind the program's, see both; they are there for one
backward. Two things are told apart from all others: a factor, and a limit for each element.
"""

from __future__ import annotations

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
            if hooks and described.wrapper and len(undo) < _PARAMETERS:
                undo.append((hooks, _around(probe, record, described.name, param)))


def _around(probe: Probe, record: Backward, name: str, param: torch.Tensor) -> list[int]:
    """Put a hook before and one behind those that `param` has; their keys."""
    given: list[torch.Tensor] = []

    def before(gradient: torch.Tensor) -> None:
        given[:] = [_some(gradient)]

    def behind(gradient: torch.Tensor) -> None:
        if given:
            probe.harmlessly(_compare, record, name, given.pop(), _some(gradient))

    hooks = param._backward_hooks
    assert hooks is not None
    theirs = dict(hooks)
    # Called in the order in which they were put in, which `move_to_end` does not change.
    hooks.clear()
    keys = [param.register_hook(before).id]
    hooks.update(theirs)
    keys.append(param.register_hook(behind).id)
    return keys


def _some(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().reshape(-1)[:_ELEMENTS].clone()


def _compare(record: Backward, name: str, given: torch.Tensor, left: torch.Tensor) -> None:
    if given.shape != left.shape or not torch.isfinite(given).all() or torch.equal(given, left):
        return
    limit = float(left.abs().max())
    close = _CLOSE * limit
    if not limit:
        return
    if float((given.clamp(-limit, limit) - left).abs().max()) <= close:
        record.hooked[name] = {"limit": limit}
        return
    factor = float(left.double() @ given.double()) / float(given.double() @ given.double())
    if float((factor * given - left).abs().max()) <= close:
        record.hooked[name] = {"factor": factor}
