# SPDX-License-Identifier: Apache-2.0
"""What a Function that adds up over ranks is given in backward, and what it gives back.

Hooks on its node tell, and not the collective that it calls: what it multiplies or divides by,
before or after that, is seen as well. They are there for one backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.facts import Gathered
    from lockstep.audit.probe.probe import Probe


def watch(probe: Probe, result: torch.Tensor, node: Any, fact: Gathered) -> None:
    """Let `fact` know the norms of what `node`, whose forward made `result`, is given and gives."""
    if fact.differentiable and result.numel() > 1 and not has_hooks(result):
        _measure(probe, node, fact, lambda gradients: gradients)


def watch_gather(probe: Probe, node: Any, fact: Gathered) -> None:
    """The same of a gather: of the gradients that it is given, the one of this rank's own rows."""

    def own(gradients: Any) -> Any:
        is_of_all = len(gradients) == fact.group == dist.get_world_size()
        return [gradients[dist.get_rank()]] if is_of_all else []

    _measure(probe, node, fact, own)


def _measure(probe: Probe, node: Any, fact: Gathered, own: Callable[[Any], Any]) -> None:
    if any(has_hooks(p) for w in probe.optimizers.values() for p in w.parameters):
        return  # what they divide by would not be seen

    def before(gradients: Any) -> None:
        fact.given = probe.harmlessly(_norm, own(gradients))

    def behind(gradients: Any, _: Any) -> None:
        fact.given_back = probe.harmlessly(_norm, gradients)

    for handle in (node.register_prehook(before), node.register_hook(behind)):
        probe.passing_back.callback(handle.remove)


def before_functions(nodes: set[Any]) -> set[Any]:
    """Those of a graph's nodes whose result goes into a Function next, as one that scales it."""
    functions = [n for n in nodes if isinstance(n, BackwardCFunction)]
    return {before for function in functions for before, _ in function.next_functions}


def has_hooks(tensor: torch.Tensor) -> bool:
    """Of the program's own, that see or change its gradient?"""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def _norm(gradients: Any) -> float | None:
    held = [g for g in gradients if isinstance(g, torch.Tensor)]
    if len(held) != 1 or held[0].layout is not torch.strided:
        return None
    return float(held[0].detach().double().norm())
