# SPDX-License-Identifier: Apache-2.0
"""`BatchWeights`: the weights of a rank's batches, by which their losses are multiplied.

A weighted backward multiplies its loss by weight / unit, and the reduced sum of the gradients is
divided by the sum of weight / unit. A unit is about the mean weight of a batch. It cancels, but
keeps the gradients near their usual size: a loss times 100 000 tokens would overflow float16. All
ranks take the same unit, known beforehand or from the sums of the same earlier round: where a
gather sends gradients across ranks, losses in different units would be silently wrong.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lockstep import reduction_context
from lockstep.errors import ConfigurationError, WeightError, WrongTypeError
from lockstep.sync.round_contribution import PLAIN, WEIGHTED

if TYPE_CHECKING:
    from lockstep.group import Group
    from lockstep.sync.round_contribution import RoundTotals


def as_weight(weight: Any, where: str) -> float:
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


def _no_loss_error(given: Any, where: str) -> WrongTypeError:
    """A backward was given `given`, which is no tensor."""
    fix = "return the loss as a tensor"
    if isinstance(given, int | float):
        fix = "on a rank that has no loss in this step: gradients.reduce_pending()"
    elif hasattr(given, "keys"):
        fix = "gradients.backward(out['loss'], weight=...)"
    keys = f" with keys {sorted(map(str, given.keys()))}" if hasattr(given, "keys") else ""
    return WrongTypeError(
        "backward was given a loss that is no tensor",
        where=where,
        expected="a tensor",
        got=f"{type(given).__name__}{keys}" if keys else f"{type(given).__name__}: {given!r:.60}",
        fix=fix,
    )


def scale_loss(
    loss: torch.Tensor, given: torch.Tensor | None, scale: float, where: str
) -> tuple[float, torch.Tensor, torch.Tensor | None]:
    """Multiply a loss by `scale`, and so the gradients of its backward.

    Torch compares the shape of an explicit ``gradient=``, for which it imports sympy, a third of a
    second: in a worker that would happen in the step after a death, when fewer workers carry
    unequal parts. So a hook multiplies the 1 with which torch begins a backward by itself.

    Args:
        loss: a scalar, or with `given` of any shape.
        given: the user's own ``gradient=``.
        scale: weight / unit.
        where: for the error.

    Returns:
        The scale rounded to the root's dtype (the gradients will carry the rounded scale, so they
        must also be divided by it), the root, and its ``gradient=``.

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
    # A view, so that the user's own hooks on the loss see the multiplied gradient.
    with torch.enable_grad():  # backward works under no_grad as well
        root = loss.view_as(loss)
    root.register_hook(lambda gradient: gradient * carried)
    return carried, root, None


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype, device="cpu").item())


class BatchWeights:
    """The weights of one rank's batches, in units that all ranks have in common.

    A unit is about the mean weight of a batch: in units of it a weight is a number near 1. If no
    total is expected (`set_expected_total`), or if it counts samples and the backwards' weights
    count tokens, the unit becomes the power of two nearest to the last round's mean weight, for
    each kind of backward: dividing by a power of two does not round, so the result does not depend
    on what that round was.

    Args:
        group: the ranks.
        num_shards: a step's batches are those of so many shards; None: one for each rank.
        averages: False if the losses are sums over their batches: of a weight only its being
            zero or not matters, and the unit is 1.

    Attributes:
        num_backwards: how many backwards of these batches have begun.
    """

    def __init__(self, group: Group, num_shards: int | None, *, averages: bool) -> None:
        self.averages = averages
        self.num_backwards = 0
        self._place = group.place
        self._num_batches = num_shards or group.size
        # With a fixed order of shards no number may depend on the number of ranks.
        self._has_learned_units = averages and num_shards is None
        self._unit_by_kind = {PLAIN: 1.0, WEIGHTED: 1.0}
        self._mean = 1.0
        self._delivered: float | WeightError | None = None

    def unit(self, kind: str) -> float:
        """The divisor of the weight of a backward of `kind`."""
        return self._mean * self._unit_by_kind[kind]

    def set_expected_total(self, total: float | None) -> None:
        """See `GradientSync.expect_weight`; equal weights then need no division."""
        self._mean = total / self._num_batches if total and self.averages else 1.0

    def update_units(self, sums: RoundTotals) -> None:
        """Take the next unit from a round's sums; they are the same on every rank."""
        if not self._has_learned_units:
            return
        for kind, ranks in ((PLAIN, sums.plain), (WEIGHTED, sums.weighted)):
            if ranks and math.isfinite(sums.weight) and sums.weight > 0.0:
                found = sums.weight * self._num_batches / ranks * self._unit_by_kind[kind]
                self._unit_by_kind[kind] = 2.0 ** round(math.log2(found))

    def deliver(self, weight: float | WeightError | None) -> None:
        """See `GradientSync.set_delivered_weight`."""
        is_number = weight is not None and not isinstance(weight, WeightError)
        number = as_weight(weight, self._place) if is_number else None
        self._delivered = weight if isinstance(weight, WeightError) else number
        reduction_context.set_batch_weight(number)

    @property
    def delivered(self) -> float | None:
        """The argument of the last `deliver`; an error is raised."""
        if isinstance(self._delivered, WeightError):
            raise self._delivered
        return self._delivered

    @property
    def is_borrowed(self) -> bool:
        """Whether the current batch is borrowed (see `lockstep.data.sharded_loader`): this rank
        has no samples in this step."""
        return self._delivered == 0.0

    def scale_loss(
        self, loss: torch.Tensor, given: torch.Tensor | None, weight: float
    ) -> tuple[float, torch.Tensor, torch.Tensor | None]:
        """Multiply the loss by its weight in units; see the function `scale_loss`.

        Raises:
            WrongTypeError: the loss is no tensor.
        """
        if not isinstance(loss, torch.Tensor):
            raise _no_loss_error(loss, self._place)
        share = weight / self.unit(WEIGHTED) if self.averages else float(weight > 0)
        return scale_loss(loss, given, share, self._place)
