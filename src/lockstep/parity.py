# SPDX-License-Identifier: Apache-2.0
"""Compares gradients of N workers with those of one process, and explains differences.

The measure is relative to the parameter's own gradient, but never finer than a thousandth of
the whole gradient's norm: where the true gradient is zero up to rounding, rounding is all
that there is to compare.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOT_SYNCHRONISED: Final = "differs between ranks: it is not synchronised"

NO_NUMBERS: Final = "NaN or infinite, in one process as well"

ALL_ZERO: Final = "zero in one process, and not here"

FLOOR: Final = 1e-3
"""The part of the whole gradient's norm below which a parameter's own does not count."""

TOLERANCES: Final = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 1e-2,
}
"""The largest relative error that rounding explains, by the parameter's dtype."""


@dataclass(frozen=True)
class ParityRow:
    """One parameter, on the rank where it is farthest from one process.

    Attributes:
        parameter: its name in the model.
        relative_error: norm of the difference / norm of the true gradient (see the module).
        scale: the multiple of the true gradient that fits best; 1 is right.
        cosine: of the angle between the two; 1 is right.
        rank: where it was farthest.
        ok: within what rounding explains.
        explanation: what a wrong value means, or why nothing could be compared; empty when right.
    """

    parameter: str
    relative_error: float
    scale: float
    cosine: float
    rank: int
    ok: bool
    explanation: str

    @property
    def verdict(self) -> str:
        """The result of the row in words."""
        if self.ok:
            return self.explanation or "equal"
        return f"rank {self.rank}: {self.explanation}"


@dataclass(frozen=True)
class ParityReport:
    """The result of `verify` and `assert_parity`: one row a parameter, notes on layers turned off.

    Attributes:
        inconclusive: why a right result does not show that the gradients are right; empty where
            they were held against one process that took the global batch whole.
    """

    rows: Sequence[ParityRow]
    world_size: int
    notes: Sequence[str] = field(default=())
    inconclusive: str = ""

    @property
    def ok(self) -> bool | None:
        """True and False as found; None where nothing is wrong that could be compared."""
        if not all(row.ok for row in self.rows):
            return False
        return None if self.inconclusive else True

    def __str__(self) -> str:
        width = max([len("parameter"), *(len(row.parameter) for row in self.rows)])
        lines = [f"inconclusive: {self.inconclusive}"] if self.inconclusive else []
        lines.append(f"{'parameter':<{width}}  relative error   scale  cosine  verdict")
        for row in self.rows:
            lines.append(
                f"{row.parameter:<{width}}  {row.relative_error:14.1e}  {row.scale:6.3f}"
                f"  {row.cosine:6.3f}  {row.verdict}"
            )
        lines.append(self._conclusion())
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _conclusion(self) -> str:
        wrong = sum(not row.ok for row in self.rows)
        workers = "1 worker" if self.world_size == 1 else f"{self.world_size} workers"
        is_partial = self.inconclusive or any(row.explanation for row in self.rows)
        alike = "no difference in what could be compared" if is_partial else "equal"
        found = f"{wrong} of {len(self.rows)} parameters differ" if wrong else alike
        return f"{workers} against one process: {found}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text of `__str__`, for an IPython terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        head = "".join(
            f"<th>{title}</th>"
            for title in ("parameter", "relative error", "scale", "cosine", "verdict")
        )
        body = "".join(
            f"<tr><td>{escape(row.parameter)}</td><td>{row.relative_error:.1e}</td>"
            f"<td>{row.scale:.3f}</td><td>{row.cosine:.3f}</td>"
            f"<td>{escape(row.verdict)}</td></tr>"
            for row in self.rows
        )
        notes = "".join(f"<p>{escape(note)}</p>" for note in (self._conclusion(), *self.notes))
        first = f"<p>inconclusive: {escape(self.inconclusive)}</p>" if self.inconclusive else ""
        return f"{first}<table><tr>{head}</tr>{body}</table>{notes}"


def compare(
    truth: Mapping[str, torch.Tensor | None],
    by_rank: Sequence[Mapping[str, torch.Tensor | None]],
    notes: Sequence[str] = (),
    tolerance: float | None = None,
) -> ParityReport:
    """Compare every rank's gradients with those of one process.

    Args:
        truth: gradient by parameter name, from one process; None where it has none.
        by_rank: the same from every rank, after its reduction.
        notes: for the report: layers that were turned off, parameters that cannot be compared.
        tolerance: largest relative error; by dtype if None.
    """
    floor = FLOOR * float(
        torch.stack([_flat(grad).norm() for grad in truth.values() if grad is not None]).norm()
        if any(grad is not None for grad in truth.values())
        else 0.0
    )
    rows = [
        _row(name, true, [grads.get(name) for grads in by_rank], floor, tolerance)
        for name, true in truth.items()
    ]
    return ParityReport(rows, len(by_rank), notes)


def _flat(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.detach()
    if grad.is_complex():
        grad = torch.view_as_real(grad.resolve_conj())
    return grad.to("cpu", torch.float64).reshape(-1)


def _row(
    name: str,
    true: torch.Tensor | None,
    found: Sequence[torch.Tensor | None],
    floor: float,
    tolerance: float | None,
) -> ParityRow:
    world_size = len(found)
    present = [rank for rank, grad in enumerate(found) if grad is not None]
    if true is None or len(present) < world_size:
        return _presence_row(name, true, present, world_size)
    reference = _flat(true)
    values = [_flat(grad) for grad in found if grad is not None]
    if not all(bool(value.isfinite().all()) for value in (reference, *values)):
        return _non_finite_row(name, reference, values)
    norm = max(float(reference.norm()), floor) or 1.0  # nothing but zeros in one process
    errors = [float((value - reference).norm()) / norm for value in values]
    rank = max(range(world_size), key=errors.__getitem__)
    value = values[rank]
    squared = float(reference @ reference)
    scale = float(value @ reference) / squared if squared else 1.0
    lengths = float(value.norm() * reference.norm())
    cosine = float(value @ reference) / lengths if lengths else 1.0
    limit = TOLERANCES.get(true.dtype.to_real(), 1e-5) if tolerance is None else tolerance
    ok = errors[rank] <= limit
    alike = all(float((other - values[0]).norm()) <= limit * norm for other in values)
    text = "" if ok else explain(scale, cosine, alike, world_size) if squared else ALL_ZERO
    return ParityRow(name, errors[rank], scale, cosine, rank, ok, text)


def _non_finite_row(
    name: str, reference: torch.Tensor, values: Sequence[torch.Tensor]
) -> ParityRow:
    """A gradient with NaN or infinity is right where one process has them in the same places."""
    same = [torch.allclose(value, reference, equal_nan=True) for value in values]
    if all(same):
        return ParityRow(name, 0.0, 1.0, 1.0, 0, True, NO_NUMBERS)
    text = "NaN or infinite on one side only: an overflow, or an empty batch that was not left out"
    return ParityRow(name, float("inf"), 0.0, 0.0, same.index(False), False, text)


def _presence_row(
    name: str, true: torch.Tensor | None, present: Sequence[int], world_size: int
) -> ParityRow:
    if true is None and not present:
        return ParityRow(name, 0.0, 1.0, 1.0, 0, True, "")
    rank = next((rank for rank in range(world_size) if (rank in present) == (true is None)), 0)
    text = (
        "one process leaves it without a gradient, workers do not"
        if true is None
        else "no gradient here: it was not synchronised, or its path was cut"
    )
    return ParityRow(name, float("inf"), 0.0, 0.0, rank, False, text)


def explain(scale: float, cosine: float, alike: bool, world_size: int) -> str:
    """The most likely cause of a wrong gradient, in words."""
    if not alike:
        return NOT_SYNCHRONISED
    if cosine < 0.999:
        return (
            "wrong direction: most often a loss that is a mean over tokens, or over what a mask"
            " leaves, without its WEIGHT, or a mask that depends on how the batch is cut; else"
            " a gradient path is missing"
        )
    for factor, meaning in (
        (world_size, f"{world_size} times too large: summed but not divided, or loss x N"),
        (
            1 / world_size,
            f"1/{world_size} of it: divided twice, a missing factor N, or a loss that is a sum",
        ),
    ):
        if world_size > 1 and abs(scale / factor - 1) < 0.05:
            return meaning
    if abs(scale - 1) > 1e-3:
        return f"{scale:.3f} times the true gradient: weights or a factor are wrong"
    return "a little off: more than rounding explains"
