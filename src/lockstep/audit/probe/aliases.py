# SPDX-License-Identifier: Apache-2.0
"""Tensors with a gradient whose values a collective changes through ``.data`` or ``.detach()``.

What is communicated has no graph then, and shares its memory with a tensor that has one, which the
calling functions hold. What counts is what is computed from that tensor afterwards: whether the
sum is still there when backward begins, and whether gradients depend on it.
"""

from __future__ import annotations

import inspect
import math
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.audit.facts import Alias
from lockstep.audit.probe.frames import looks_at_its_locals, users_frames
from lockstep.audit.probe.loss_graph import TRANSPARENT, Scaling, operands, weight_at
from lockstep.audit.probe.passed_back import has_hooks

if TYPE_CHECKING:
    from types import FrameType

_CLOSE: Final = 1e-4
_FRAMES: Final = 2
_IN_A_ROW: Final = 4
_HELD_BY_FRAME: Final = 3
"""References to a frame's dictionary of locals: the frame's, and two while one looks."""

_LINEAR: Final = TRANSPARENT | {
    *(f"{name}Backward0" for name in ("Add", "Sub", "Neg", "Mean", "Sum", "Select", "Slice")),
    *(f"{name}Backward0" for name in ("Index", "Permute", "T", "Transpose", "Expand", "Cat")),
    *("StackBackward0", "DiagonalBackward0", "MeanBackward1", "SumBackward1"),
}


def with_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """One of the callers' local variables that is computed by autograd and lies where it lies."""
    if tensor.requires_grad or tensor.layout is not torch.strided or not tensor.numel():
        return None
    for frame in users_frames(_FRAMES):
        for value in _values(frame):
            if isinstance(value, torch.Tensor) and _lies_where(value, tensor):
                return value
    return None


def _values(frame: FrameType) -> list[Any]:
    if looks_at_its_locals(frame):
        return []
    names = frame.f_locals
    values = list(names.values())
    in_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if in_function and type(names) is dict and sys.getrefcount(names) <= _HELD_BY_FRAME:
        names.clear()  # a copy, which would keep tensors alive for as long as the function runs
    return values


def _lies_where(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    if value.grad_fn is None or value.layout is not torch.strided:
        return False
    return (
        value.numel() == tensor.numel()
        and value.device == tensor.device
        and not value.is_meta
        and value.data_ptr() == tensor.data_ptr()
    )


def number_of_next_node() -> int:
    """Operations that autograd sees from here on have numbers that are not smaller."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    return sys.maxsize if node is None else int(node._sequence_nr())


def facts_of(
    tensor: torch.Tensor, node: Any, nodes: set[Any], left: float, since: int
) -> Alias | None:
    """How `tensor`, in which there was a sum over ranks, is used in the loss that is sent back.

    None if it is not used after that, was changed behind autograd's back, or has hooks.

    Args:
        tensor: what autograd had computed.
        node: by this operation, before the sum.
        nodes: those of the loss's graph.
        left: the tensor's norm when the sum was there; of one number, the number.
        since: the number of the operations that came after.
    """
    later = {n for n in nodes if _is_given(n, node) and n._sequence_nr() >= since}
    if not later or has_hooks(tensor):
        return None
    held = tensor.detach().double()
    now = float(held.abs() if held.numel() == 1 else held.norm())
    above = _above(nodes, later)
    # As `t /= n` does, after `all_reduce(t.data)`.
    by_autograd = [weight_at(tensor, node)] if tensor.grad_fn else _products(node, nodes)
    if not any(f and math.isclose(now, abs(left * f), rel_tol=_CLOSE) for f in by_autograd):
        return None
    factors = {abs(f) for n in above if (f := _factor(n)) is not None}
    return Alias(any(not _is_linear(n) for n in above), sorted(factors))


def _is_given(node: Any, target: Any) -> bool:
    return any(fn is target or fn == target for fn, _ in node.next_functions)


def _above(nodes: set[Any], begin: set[Any]) -> set[Any]:
    """The nodes that `begin` are, and those to which their results go."""
    users: dict[Any, list[Any]] = {}
    for node in nodes:
        for given, _ in node.next_functions:
            if given is not None:
                users.setdefault(given, []).append(node)
    found: set[Any] = set()
    waiting = list(begin)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += users.get(node, [])
    return found


def _products(node: Any, nodes: set[Any]) -> list[float]:
    """What operations one after the other may have multiplied it by, where it was let go since."""
    found, place = [1.0], node
    for _ in range(_IN_A_ROW):
        users = [n for n in nodes if _is_given(n, place) and _factor(n) is not None]
        if len(users) != 1:
            break
        place = users[0]
        found.append(found[-1] * (_factor(place) or 1.0))
    return found


def _is_linear(node: Any) -> bool:
    inputs = [fn for fn, _ in node.next_functions]
    name = node.name()
    if name in ("MulBackward0", "MulBackward1"):
        return sum(fn is not None for fn in inputs) == 1
    if name in ("DivBackward0", "DivBackward1"):
        return len(inputs) < 2 or inputs[1] is None
    return name in _LINEAR


def _factor(node: Any) -> float | None:
    """The number that it multiplies by, or divides."""
    if not node.name().startswith(("Mul", "Div")) or not _is_linear(node):
        return None
    return next((below.weight for _, below in operands(node, Scaling(1.0))), None)
