# SPDX-License-Identifier: Apache-2.0
"""The weights of one accumulation window: what was put on the roots, what is divided by.

A weighted backward multiplies its root by weight / unit, and the reduced sum is divided by the
sum of weight / unit. The unit cancels, but keeps what flows backward near 1: a root times
100 000 tokens would overflow float16. All ranks take the same one, known beforehand or from
the sums of the same earlier round: where a gather sends gradients across ranks, roots of
different units would be silently wrong.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lockstep._torch_compat import version_of
from lockstep.errors import ConfigurationError, MixedWeightsError, WeightError
from lockstep.sync.reducer import PLAIN, WEIGHTED, Contribution

if TYPE_CHECKING:
    from lockstep.sync.buckets import Slot, Sums


def checked_weight(weight: Any, where: str) -> float:
    """A weight as a float.

    Raises:
        WeightError: it is not a number, or negative, NaN or infinite.
    """
    try:
        value = float(weight)
    except (TypeError, ValueError):
        value = math.nan
    if math.isfinite(value) and value >= 0.0:
        return value
    raise WeightError(
        "a batch's weight must be a finite number, zero or more",
        where=where,
        got=repr(weight),
        fix="gradients.backward(loss, weight=len(batch)), or the number of tokens",
    )


def weighted_root(
    loss: torch.Tensor, given: torch.Tensor | None, scale: float, where: str
) -> tuple[float, torch.Tensor, torch.Tensor | None]:
    """Where backward starts, so that its gradients carry `scale`.

    A gradient that backward is given has its shape compared, for which torch imports sympy, a
    third of a second: in a worker that would be the step after a death, when fewer workers carry
    unequal parts. So the 1 that backward takes by itself is multiplied on its way.

    Args:
        loss: a scalar, or with `given` of any shape.
        given: the user's own ``gradient=``.
        scale: weight / unit.
        where: for the error.

    Returns:
        The scale as the root's dtype can hold it (the rounded one is what the gradients will
        carry, so it is also what they must be divided by), the root, and its ``gradient=``.

    Gradient:
        Of `scale` times the loss.

    Raises:
        ConfigurationError: the loss is not a scalar and `given` is None.
    """
    # Equal weights, the usual case: every dtype holds 1, and asking it costs 2 us a step.
    carried = 1.0 if scale == 1.0 else _rounded(scale, loss.dtype)
    if given is not None:
        return carried, loss, given * carried
    if loss.numel() != 1:
        raise ConfigurationError(
            "the loss is not a scalar",
            where=where,
            got=f"shape {tuple(loss.shape)}",
            fix="reduce it to its mean, or pass gradient=",
        )
    if not loss.dtype.is_floating_point:
        return carried, loss, torch.full_like(loss, carried)
    if carried == 1.0 or not loss.requires_grad:
        return carried, loss, None
    # A view: hooks of the user's own on the loss see what arrives there.
    with torch.enable_grad():  # backward itself does not ask whether it is
        root = loss.view_as(loss)
    root.register_hook(lambda gradient: gradient * carried)
    return carried, root, None


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype, device="cpu").item())


class Units:
    """About the mean weight of a part: in units of it a weight is a number near 1.

    What nobody says beforehand (that there are tokens where samples were expected) is made up
    for by the power of two nearest to the last round's weights, for each kind of backward: a
    power of two, so that the result does not depend on what that round was.

    Args:
        size: number of parts that a step is made of: ranks, or shards.
        fixed: the units stay 1.
        learns: they follow what earlier rounds weighed.
    """

    def __init__(self, size: int, *, fixed: bool = False, learns: bool = True) -> None:
        self._size = size
        self._fixed = fixed
        self._learns = learns and not fixed
        self._of = {PLAIN: 1.0, WEIGHTED: 1.0}
        self._mean = 1.0

    def __getitem__(self, kind: str) -> float:
        return self._mean * self._of[kind]

    def expect(self, total_weight: float | None) -> None:
        """What all parts weigh together is known; equal weights then need no division."""
        self._mean = total_weight / self._size if total_weight and not self._fixed else 1.0

    def learn(self, sums: Sums) -> None:
        """Take the next unit from a round's sums; they are the same on every rank."""
        if not self._learns:
            return
        for kind, ranks in ((PLAIN, sums.plain), (WEIGHTED, sums.weighted)):
            if ranks and math.isfinite(sums.weight) and sums.weight > 0.0:
                found = sums.weight * self._size / ranks * self._of[kind]
                self._of[kind] = 2.0 ** round(math.log2(found))


Left = tuple[weakref.ref[torch.Tensor], int]
"""A gradient as a backward has left it, and its version."""


def gradient_as_left(grad: torch.Tensor | None) -> Left | None:
    """What a backward has left in a parameter's ``grad``; None where it left none."""
    # Not by its id: a freed gradient's is soon another one's. And not held: it is the user's.
    return None if grad is None else (weakref.ref(grad), version_of(grad))


def is_as_left(left: Left | None, grad: torch.Tensor | None) -> bool:
    """Is `grad` the tensor that the backward left, and has nobody written it since?"""
    if left is None or grad is None:
        return left is None and grad is None
    return left[0]() is grad and left[1] == version_of(grad)


@dataclass
class WindowWeights:
    """The backwards since the last round, on this rank.

    Attributes:
        kind: PLAIN, WEIGHTED, or None before the first.
        weight: of the weighted backwards so far, in units.
        delivered: the weight that the first plain backward carried (None: one per rank).
        faults: what the round has to refuse.
        aside: gradients that earlier rounds left, kept out of this one.
        earlier: which there were, and what was done to them since; see `buckets.set_aside`.
        is_edited: something was done to them.
        left: what each ``parameter.grad`` was when the window's last backward had ended.
    """

    kind: str | None = None
    weight: float = 0.0
    delivered: float | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)
    aside: dict[Slot, Any] = field(default_factory=dict)
    earlier: int = 0
    is_edited: bool = False
    left: list[Left | None] | None = None

    @property
    def aside_by_id(self) -> dict[int, Any]:
        """`aside`, by the ids of the parameters."""
        return {id(slot.param): grad for slot, grad in self.aside.items()}

    def enter(self, kind: str, where: str) -> bool:
        """Note a backward of `kind`. True if it is the first of the window.

        Raises:
            MixedWeightsError: the window holds backwards of the other kind.
        """
        if self.kind is None:
            self.kind = kind
            return True
        if self.kind != kind:
            raise mixed_weights(where, f"a {self.kind} backward, then a {kind} one")
        return False

    def enter_plain(self, delivered: float | None, where: str) -> None:
        """Note a plain backward of a batch that counts `delivered`."""
        if self.enter(PLAIN, where):
            self.delivered = delivered
        elif self.delivered != delivered:
            # The sum of local gradients cannot be taken apart any more. Reported and not
            # raised: on the other ranks the weights may have stayed the same.
            self.faults.append({"kind": "changed", "names": [f"{self.delivered} to {delivered}"]})

    def enter_sum(self, delivered: float | None, where: str) -> None:
        """Note a plain backward whose loss is a sum, of a batch that counts unless zero."""
        counts = None if delivered is None else float(delivered > 0)
        if self.enter(WEIGHTED, where):
            self.delivered = counts
        elif self.delivered != counts:
            self.faults.append({"kind": "emptied", "names": [f"{self.delivered} to {counts}"]})
        self.weight += 1.0 if counts is None else counts

    def contribution(self, units: Units) -> Contribution:
        """What this rank brings to the round that closes the window."""
        discards = self.delivered == 0.0
        if self.kind == WEIGHTED:
            return self._contribution(WEIGHTED, self.weight, 1.0, discards)
        if self.kind == PLAIN:
            weight = (1.0 if self.delivered is None else self.delivered) / units[PLAIN]
            return self._contribution(PLAIN, weight, weight, discards)
        return self._contribution(None, 0.0, 1.0, False)

    def _contribution(
        self, kind: str | None, weight: float, scale: float, discards: bool
    ) -> Contribution:
        known = kind == PLAIN and self.delivered is not None
        told = (self.earlier, self.is_edited)
        return Contribution(kind, weight, scale, self.faults, *told, known, discards)


_BOTH = "loss.backward() and gradients.backward(loss, weight=...) were both used"


def mixed_weights(where: str, got: str, cause: str = _BOTH) -> MixedWeightsError:
    return MixedWeightsError(
        "weighted and plain backwards in one accumulation window",
        where=where,
        got=got,
        cause=cause,
        fix="use gradients.backward(loss, weight=...) for every backward of the window;"
        " in an operator self.backward(loss)",
    )
