# SPDX-License-Identifier: Apache-2.0
"""What one rank has to refuse, raised on every rank with the same words.

A rank that raised alone would leave its peers waiting. So it sends zeros and a count in the
tail, and when all have seen the count, they exchange what it stands for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import GradientNotReducedError, LockstepError, SparseGradientError
from lockstep.sync.window import mixed_weights

if TYPE_CHECKING:
    from lockstep.group import Group

Faults = list[dict[str, Any]]


def raise_together(group: Group, mine: Faults) -> None:
    """Exchange the faults and raise the first one, by rank.

    Collective:
        Every rank of the round, because every rank has read the same count. Two all-gathers.

    Raises:
        SparseGradientError, MixedWeightsError, GradientNotReducedError: what it was.
    """
    everyone: list[Faults] = group.exchange(mine)
    ranks = [rank for rank, faults in enumerate(everyone) if faults]
    raise _as_error(everyone[ranks[0]][0], f"rank {', '.join(map(str, ranks))} of {group.size}")


def raise_alone(place: str, mine: Faults) -> None:
    """Raise without an exchange, where the ranks do not read the count at the same time.

    Raises:
        SparseGradientError, MixedWeightsError, GradientNotReducedError: this rank's, if any.
    """
    if mine:
        raise _as_error(mine[0], place)
    raise GradientNotReducedError(
        "another rank refused the last reduction",
        where=place,
        fix="look for the first failure among the other ranks",
    )


def _as_error(fault: dict[str, Any], where: str) -> LockstepError:
    names = ", ".join(f"`{name}`" for name in fault["names"])
    if fault["kind"] == "sparse":
        return SparseGradientError(
            "a sparse gradient cannot travel in a flat bucket",
            where=where,
            got=names,
            cause="nn.Embedding(sparse=True) or a sparse tensor in the graph",
            fix="use sparse=False, or mark the parameter: lockstep.local(parameter)",
        )
    if fault["kind"] == "changed":
        return mixed_weights(where, f"the delivered weight changed from {fault['names'][0]}")
    return GradientNotReducedError(
        "a gradient arrived after its bucket had left",
        where=where,
        got=names,
        cause="reentrant checkpointing runs backward through this parameter more than once, "
        "and did not in the first step",
        fix="use torch.utils.checkpoint(..., use_reentrant=False)",
    )
