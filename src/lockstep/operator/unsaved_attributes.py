# SPDX-License-Identifier: Apache-2.0
"""Says which attributes a step has changed that no ``state_dict`` of the optimizer holds.

As in one process a checkpoint has what ``state_dict`` returns. Lookahead's ``self.slow`` is not
in it: a run that resumes begins without it, and so does a worker that joins after a death, beside
others that have it. Before the first step nobody knows which attributes count.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import version_of
from lockstep.operator.attributes_copy import content_of
from lockstep.sync.optimizer_inspection import inner_optimizers, own_attributes
from lockstep.tensor_tree import PLAIN_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from lockstep.operator.loop_protocols import Operator

    Listener = Callable[[Optimizer, Any, Any], None]


_log = logging.getLogger("lockstep")

_MOST_DEEP: Final = 6
"""How many containers within each other are looked into."""


def unsaved_attribute_listeners(operator: Operator) -> tuple[Listener, Listener]:
    """What has to be called before and after each step, to warn of what the first one changes."""
    context = operator._lockstep.context
    is_quiet = context.world_rank > 0 or context.is_trial
    registered = operator._lockstep.registered
    optimizers = [] if is_quiet or registered is None else registered.optimizers
    waiting = [each for each in optimizers if _has_plain_state(each)]
    before: dict[Optimizer, dict[str, Any]] = {}

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is each for each in waiting):
            before[optimizer] = _contents_of(optimizer)

    def compare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        was = before.pop(optimizer, None)
        if was is None:
            return
        waiting.remove(optimizer)
        now = _contents_of(optimizer)
        changed = [
            name
            for name, content in now.items()
            # A flag that is set once (`initialized`) says that a cache is filled.
            if content is not True and (name not in was or was[name] != content)
        ]
        if changed:
            _log.warning(
                "A step of %s has changed its attributes %s, which its state_dict() does not hold:"
                " they begin anew in a run that resumes, and in a worker that joins after a death."
                " If later steps depend on them, keep them in self.state[parameter] or in"
                " param_groups",
                type(optimizer).__name__,
                ", ".join(f"`{name}`" for name in changed),
            )

    return note, compare


def _has_plain_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer is of the user's own, with the ``state_dict`` that torch gives all."""
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.")  # these have nothing but caches there
    return not is_torchs and kind.state_dict is torch.optim.Optimizer.state_dict


def _contents_of(optimizer: Optimizer) -> dict[str, Any]:
    """By the name of each attribute something that differs if a step changes it."""
    members = [optimizer, *inner_optimizers(optimizer)]
    saved = [id(held) for each in members for held in (each.state, each.param_groups)]
    own = own_attributes(optimizer)
    return {name: _content(own[name]) for name in own if id(own[name]) not in saved}


def _content(value: Any, depth: int = _MOST_DEEP) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    held = content_of(value) if depth else None
    if held is not None:
        return [_content(each, depth - 1) for each in held]
    return value if isinstance(value, PLAIN_TYPES) else id(value)
