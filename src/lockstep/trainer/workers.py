# SPDX-License-Identifier: Apache-2.0
"""Whether a trainer's workers survive the death of one of them."""

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
    if not engine.spec.is_recoverable:
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
    options = spec.options
    if not options.wrap_ddp:
        got, cause = "wrap_ddp=False", "a wrapper of your own keeps the broken group"
    elif not options.add_dist_sampler:
        got, cause = "add_dist_sampler=False", "only the lost worker knows its part of the data"
    else:
        got, cause = f"sync={options.sync!r}", "a part of the state is lost with the worker"
    raise NotAvailableError(
        "a spare worker cannot take over here",
        got=f"spare_workers={num_spares}, {got}",
        cause=cause,
        fix='sync="replicate", or leave spare_workers out and save checkpoints',
    )
