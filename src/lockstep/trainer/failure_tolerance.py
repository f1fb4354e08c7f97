# SPDX-License-Identifier: Apache-2.0
"""Whether a trainer's workers survive the death of one of them, or an error in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.errors import NotAvailableError
from lockstep.recovery import Policy
from lockstep.trainer.arguments import checked_spares

if TYPE_CHECKING:
    from lockstep.engine import Engine
    from lockstep.engine.ray import RayEngine
    from lockstep.worker import WorkerSpec


def policy_of(
    num_workers: int, spare_workers: int, min_workers: int, hang_timeout_s: float
) -> Policy:
    """How much may be lost, from arguments that can be right."""
    checked_spares(num_workers, spare_workers, min_workers)
    return Policy(min_workers, hang_timeout_s)


def recovering(engine: RayEngine, policy: Policy) -> Engine:
    """The engine, and around it what forms its group anew, where that can be done."""
    if not engine.spec.can_go_back:
        return engine
    from lockstep.recovery.recovering import RecoveringEngine

    return RecoveringEngine(engine, policy)


def refuse_spares(spec: WorkerSpec, num_spares: int) -> None:
    """A run that ends with its first worker has no use for spares.

    Raises:
        NotAvailableError: says why it would.
    """
    if not num_spares or spec.is_recoverable:
        return
    got, cause = why_not(spec)
    raise NotAvailableError(
        "a spare worker cannot take over here",
        got=f"spare_workers={num_spares}, {got}",
        cause=cause,
        fix='sync="replicate", or leave spare_workers out and save checkpoints',
    )


def why_not(spec: WorkerSpec) -> tuple[str, str]:
    """Which argument keeps the workers from forming their group anew, and why."""
    options = spec.options
    if not options.wrap_ddp:
        return "wrap_ddp=False", "a wrapper of your own keeps the broken group"
    if not options.add_dist_sampler:
        return "add_dist_sampler=False", "only each worker itself knows its part of the data"
    return f"sync={options.sync!r}", "each worker alone has a part of the state"
