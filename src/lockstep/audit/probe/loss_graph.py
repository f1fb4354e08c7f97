# SPDX-License-Identifier: Apache-2.0
"""How much one element counts in a loss, read from the graph that autograd built.

From the loss downwards: a product with a number multiplies the weight, a quotient divides it,
until the first reduction, where each of n elements has weight w (a mean: 1/n). No second
backward is run and nothing is guessed: an operation that is not known ends the walk, and its
part of the loss is left out.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from lockstep.audit.facts import Term
from lockstep.audit.probe.graphs import saved

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Scaling(NamedTuple):
    """What a node of the graph counts in the loss: `weight`, and how that came about.

    Attributes:
        weight: by which one unit of the node changes the loss.
        divisors: by which it was divided, the first division first.
        factors: by which it was multiplied.
    """

    weight: float
    divisors: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()

    def times(self, factor: float) -> Scaling:
        return Scaling(self.weight * factor, self.divisors, (factor, *self.factors))

    def divided_by(self, divisor: float) -> Scaling:
        return Scaling(self.weight / divisor, (divisor, *self.divisors), self.factors)


_Waiting = tuple[Any, Scaling]


_MEAN: Final = 1
_SUM: Final = 2
_NODES: Final = 64
_LEAVES: Final = 2
_LOSSES: Final = {
    "NllLossBackward0",
    "NllLoss2DBackward0",
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "L1LossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
    "SoftMarginLossBackward0",
}
TRANSPARENT: Final = {
    "ViewBackward0",
    "ReshapeAliasBackward0",
    "UnsqueezeBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "CloneBackward0",
    "ToCopyBackward0",
    "AliasBackward0",
    "UnsafeViewBackward0",
}

_MEAN_OF: Final = {*TRANSPARENT, "MeanBackward0", "NegBackward0", "SumBackward1"}
_FACTORS: Final = {
    "NegBackward0",
    "MulBackward0",
    "MulBackward1",
    "DivBackward0",
    "DivBackward1",
}


def terms_of(loss: torch.Tensor, weight: float = 1.0) -> list[Term]:
    """The reductions that `loss` ends with, each with the weight of one element.

    Args:
        loss: a scalar with a graph.
        weight: of the loss itself, e.g. backward's ``gradient=``.

    Returns:
        One term for each reduction that was understood.

    Gradient:
        None: it reads the graph.
    """
    terms = [_reduction(node, scaling) for node, scaling in _walk(loss, weight) if scaling.weight]
    return [term for term in terms if term is not None]


def factor_of(loss: torch.Tensor, weight: float = 1.0) -> float:
    """What `loss` was multiplied by, as a whole, in the last lines that made it.

    Args:
        loss: a scalar with a graph.
        weight: of the loss itself, e.g. backward's ``gradient=``.

    Gradient:
        None: it reads the graph.
    """
    node, scaling = loss.grad_fn, Scaling(weight)
    for _ in range(_NODES):
        if node is None or node.name() not in TRANSPARENT | _FACTORS:
            break
        below = operands(node, scaling)
        if len(below) != 1:
            break
        node, scaling = below[0]
    return scaling.weight


def nearest_parameters(loss: torch.Tensor) -> list[torch.Tensor]:
    """The first leaves that one comes to from the loss: those of the head that it was made by.

    Gradient:
        None: it reads the graph.
    """
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting and len(seen) < _NODES and len(found) < _LEAVES:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.append(variable)
        waiting.extend(fn for fn, _ in node.next_functions)
    return found


def operands(node: Any, scaling: Scaling) -> list[_Waiting]:
    """What `node`, which counts as `scaling` says, was computed from, and what that counts."""
    name = node.name()
    inputs = [fn for fn, _ in node.next_functions]
    if name in TRANSPARENT:
        return [(inputs[0], scaling)]
    if name == "NegBackward0":
        return [(inputs[0], scaling.times(-1.0))]
    if name == "AddBackward0":
        alpha = float(getattr(node, "_saved_alpha", 1))
        second = [(inputs[1], scaling.times(alpha))] if len(inputs) > 1 else []
        return [(inputs[0], scaling), *second]
    if name == "SubBackward0":
        second = [(inputs[1], scaling.times(-1.0))] if len(inputs) > 1 else []
        return [(inputs[0], scaling), *second]
    if name in ("MulBackward0", "MulBackward1"):
        return _product(node, inputs, scaling)
    if name in ("DivBackward0", "DivBackward1"):
        by = constant_of(saved(node, "other"))
        if by is not None and by != 0.0 and (len(inputs) < 2 or inputs[1] is None):
            return [(inputs[0], scaling.divided_by(by))]
    return []


def _product(node: Any, inputs: list[Any], scaling: Scaling) -> list[_Waiting]:
    if len(inputs) > 1 and inputs[1] is not None:
        if inputs[0] is not None:
            return []  # of two things that both have a gradient: not a weight
        by = constant_of(saved(node, "self"))
        return [] if by is None else [(inputs[1], scaling.times(by))]
    other = constant_of(saved(node, "other"))
    return [] if other is None else [(inputs[0], scaling.times(other))]


def _reduction(node: Any, scaling: Scaling) -> Term | None:
    name, weight = node.name(), scaling.weight
    if name == "MeanBackward0":
        count = float(node._saved_self_sym_numel)
        return Term("mean", weight / count, count, "mean", _is_weighed(node))
    if name == "SumBackward0":
        count = float(math.prod(node._saved_self_sym_sizes))
        return _as_divided(Term("sum", weight, count, "sum", True), scaling)
    if name not in _LOSSES:
        return None
    reduction = getattr(node, "_saved_reduction", 0)
    if reduction not in (_MEAN, _SUM):
        return None
    elements = _elements(node)
    # A weighted mean divides by the weights' sum, which differs between any two batches.
    if elements is None or saved(node, "weight") is not None:
        return None
    op = name.removesuffix("0").removesuffix("Backward")
    if reduction == _MEAN:
        if not elements:
            return None
        return Term("mean", weight / elements, elements, op, False, _images(saved(node, "self")))
    term = Term("sum", weight, elements, op, False)
    if op.startswith("Nll"):
        return _as_divided(term, scaling)
    return _as_divided_rows(term, scaling, list(saved(node, "self").shape))


def _is_weighed(node: Any) -> bool:
    """Are the elements of a mean products with weights of their own, or sums of such products?

    Then the weights say what an element counts: they may add up to one over all ranks.
    """
    while node is not None and node.name() in _MEAN_OF:
        node = node.next_functions[0][0]
    inputs = [] if node is None else [fn for fn, _ in node.next_functions]
    if node is None or node.name() != "MulBackward0" or None not in inputs:
        return False
    other = saved(node, "other" if inputs[-1] is None else "self")
    return other is not None and constant_of(other) is None


def _images(given: torch.Tensor | None) -> int | None:
    """How many images a loss was computed of; None of anything else.

    A cross entropy of texts, (N, C, L), is one of images of height 1 to torch.
    """
    are_images = given is not None and given.dim() == 4 and min(given.shape[2:]) > 1
    return len(given) if are_images and given is not None else None


def _as_divided(term: Term, scaling: Scaling) -> Term:
    """A sum that was divided by how many there were is a mean, written by hand.

    Of a sum some may not count: a mask makes them zero before. And what it was divided by may be
    another number than its own elements'.
    """
    products = list(itertools.accumulate(scaling.divisors, operator.mul))
    if term.count not in products:
        divisors, factors = list(scaling.divisors), list(scaling.factors)
        term = replace(term, divisors=divisors, factors=factors)
    divisor = term.count if term.count in products else next(iter(products), 0.0)
    if divisor < 1.0 or divisor != round(divisor) or term.count < divisor:
        return term
    may_be_masked = term.may_be_masked or divisor < term.count
    return replace(term, kind="mean", count=divisor, may_be_masked=may_be_masked)


def _as_divided_rows(term: Term, scaling: Scaling, shape: Sequence[int]) -> Term | None:
    """The same of a loss that consists of rows of so many numbers each.

    A sum that was divided by the numbers in a row is one of rows, and one that was divided by the
    rows is a mean of them: no mask is at work. None where a divisor may be the one or the other.
    """
    divisors = scaling.divisors
    if term.count in itertools.accumulate(divisors, operator.mul):
        return Term("mean", term.weight, term.count, term.op, False)
    widths = set(itertools.accumulate(reversed(shape[1:]), operator.mul))
    rows = set(itertools.accumulate(shape, operator.mul))
    if any(by in widths & rows for by in divisors):
        return None
    width = next((by for by in divisors if by in widths), None)
    if width is not None:
        return Term("sum", term.weight * width, term.count / width, term.op, False)
    if divisors and divisors[0] in rows:
        return Term("mean", term.weight, divisors[0], term.op, False)
    return _as_divided(term, scaling)


def _elements(node: Any) -> float | None:
    total = saved(node, "total_weight")
    if total is not None and total.numel():
        if node._saved_reduction == _MEAN:
            return float(total)
        ignored = node._saved_ignore_index
        ignored = ignored - 2**64 if ignored >= 2**63 else ignored
        target = saved(node, "target")
        return None if target is None else float((target != ignored).sum())
    held = saved(node, "self")
    return None if held is None else float(held.numel())


def constant_of(value: Any) -> float | None:
    """A number that an operation of the graph kept, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def weight_at(loss: torch.Tensor, target: Any, weight: float = 1.0) -> float | None:
    """What the scalar that `target` computed counts in `loss`; None where it is not linear."""
    weights = [found.weight for node, found in _walk(loss, weight, target) if node is target]
    return sum(weights) if weights else None


def _walk(loss: torch.Tensor, weight: float, end: Any = None) -> Iterator[_Waiting]:
    """From the loss downwards, as far as factors lead that are not 0, and not below `end`."""
    waiting: list[_Waiting] = [(loss.grad_fn, Scaling(weight))]
    for _ in range(_NODES):
        if not waiting:
            return
        node, scaling = waiting.pop()
        if node is not None:
            yield node, scaling
            if node is not end and scaling.weight != 0.0:
                waiting.extend(operands(node, scaling))
