# SPDX-License-Identifier: Apache-2.0
"""Whose gradients were used: one rank's alone, or each rank's by a scale of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lockstep.audit.expectation import are_equal
from lockstep.audit.rules.base import Code, numbers

if TYPE_CHECKING:
    from lockstep.audit.diagnoses.seen import Seen
    from lockstep.audit.finding import Finding

ONE_RANK: Final = Code("LS107", "the gradients of one rank were used, and the others' were lost")
DIFFER: Final = Code("LS104", "gradients differ after a reduction")
SCALE: Final = Code("LS307", "loss scales differ")

_APART: Final = 0.01


def of_one_rank(seen: Seen) -> Finding | None:
    """Everybody's row has one rank's column alone."""
    used = {c.rank for c, use in zip(seen.columns, seen.uses, strict=True) if use == "shared"}
    lost = {c.rank for c, use in zip(seen.columns, seen.uses, strict=True) if use == "lost"}
    if seen.mixing is None or set(seen.uses) != {"shared", "lost"} or len(used) != 1:
        return None
    if not seen.mixing.rows_are_equal or used | lost != set(seen.ranks):
        return None
    others = [rank for rank in seen.ranks if rank not in used]
    rank = next(iter(used))
    return seen.finding(
        ONE_RANK,
        f"the ranks brought different gradients{seen.of}, and all of them used those of rank "
        f"{rank}: what ranks {others} computed is lost",
        "average: `dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)`, or "
        "`lockstep.average_gradients(model)`, instead of a broadcast",
        rank=others,
        evidence={"used": rank},
    )


def scaled_apart(seen: Seen) -> Finding | None:
    """Pieces of one gradient, of which each rank has scaled its own."""
    if seen.mixing is None or set(seen.uses) != {"shared"} or not seen.is_in_pieces:
        return None
    ratios = seen.mixing.row_ratios()
    if ratios is None or are_equal(ratios.values(), max(seen.close, _APART)):
        return None
    return seen.finding(
        DIFFER,
        f"between backward and the step the pieces of one gradient{seen.of} were multiplied by "
        f"factors of each rank's own, which are to one another as {numbers(ratios)}",
        "clip by the norm of the whole gradient: torch.nn.utils.clip_grad_norm_ knows "
        "DTensors, FullyShardedDataParallel has `model.clip_grad_norm_`",
        evidence={"factors": ratios},
    )


def _scales(seen: Seen) -> list[dict[int, float]]:
    """By rank, what its losses were multiplied by: down to the means they end in; at the root."""
    of_root = [backward.factor for backward in seen.backwards]
    known = [factor for factor in of_root if factor is not None]
    found = [] if seen.totals is None else [seen.by_rank(seen.totals)]
    return [*found, seen.by_rank(known)] if len(known) == len(of_root) else found


def _undo(ratios: dict[int, float], scales: dict[int, float], close: float) -> bool:
    """Are the scales as far apart as the rows, the other way round?"""
    apart = not are_equal(scales.values(), close)
    return apart and are_equal((ratios[rank] * scales[rank] for rank in ratios), close)


def divided_by_own_scale(seen: Seen) -> Finding | None:
    """Rows that are multiples of one another, the other way round as the losses are."""
    if seen.mixing is None or set(seen.uses) != {"shared"}:
        return None
    if any(step.scale is not None for step in seen.steps.values()):
        return None  # a GradScaler's is known by itself
    ratios = seen.mixing.row_ratios()
    if ratios is None or are_equal(ratios.values(), seen.close):
        return None
    scales = next((s for s in _scales(seen) if _undo(ratios, s, seen.close)), None)
    if scales is None:
        return None
    return seen.finding(
        SCALE,
        f"the losses were multiplied by {numbers(scales)}, and what the ranks had averaged was "
        f"divided by these again, by each rank by its own: the gradients{seen.of} that they used "
        f"differ by {max(ratios.values()) / min(ratios.values()):.6g}",
        "compute the scale from what all ranks share (a loss or an overflow that was reduced over "
        "ranks), or divide by it before the reduction",
        evidence={"scale": scales},
    )
