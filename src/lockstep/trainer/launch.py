# SPDX-License-Identifier: Apache-2.0
"""Where a trainer's workers live, and how they are started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lockstep.engine import Resources, has_gpus_elsewhere, open_remote, stays_here
from lockstep.engine.inline_engine import InlineEngine
from lockstep.errors import NotAvailableError
from lockstep.trainer.arguments import pick_backend
from lockstep.trainer.call_errors import why_not_recoverable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.engine import Engine
    from lockstep.recovery import Policy
    from lockstep.worker import WorkerSpec


@dataclass(frozen=True)
class Placement:
    """What a trainer was told of where its workers live.

    Attributes:
        num_cpus: for each worker.
        further: Ray resources for each worker besides CPU and GPU, by name.
        use_gpu: True, False or "auto", as the user said.
        has_gpu_here: CUDA is available in this process.
        backend: as the user said.
        timeout_s: bound of every collective, in seconds.
        use_local: rank 0 lives in this process.
        num_spares: workers that wait for the place of one that is lost.
        policy: how much may be lost.
    """

    num_cpus: int
    further: Mapping[str, float] | None
    use_gpu: Any
    has_gpu_here: bool
    backend: str
    timeout_s: float
    use_local: bool
    num_spares: int
    policy: Policy

    def on_gpus(self, spec: WorkerSpec) -> WorkerSpec:
        """`spec`, with a GPU for each worker where "auto" finds them on other machines.

        A driver often runs on a head node without any.

        Raises:
            NotAvailableError: spares were asked for, and a lost worker cannot be replaced.
        """
        _refuse_spares(spec, self.num_spares)  # before a Ray is started that would tell
        num_bundles = 0 if self.use_local else spec.num_workers + self.num_spares
        if self.use_gpu == "auto" and not spec.use_gpu and num_bundles > 1:
            return replace(spec, use_gpu=has_gpus_elsewhere(num_bundles))
        return spec


def start_workers(spec: WorkerSpec, placement: Placement) -> Engine:
    """Start the workers: one in this process where that can be done, else Ray actors."""
    resources = Resources(
        placement.num_cpus,
        int(spec.use_gpu) * spec.options.replicas,
        placement.further,
        pick_backend(placement.backend, spec.use_gpu),
        placement.timeout_s,
    )
    use_local = placement.use_local
    if stays_here(spec, resources, use_local=use_local, gpu_here=placement.has_gpu_here):
        return InlineEngine(spec)
    engine = open_remote(spec, resources, use_local=use_local, num_spares=placement.num_spares)
    if not spec.can_go_back:
        return engine
    # Imported here: it needs Ray.
    from lockstep.recovery.recovering_engine import RecoveringEngine

    return RecoveringEngine(engine, placement.policy)


def _refuse_spares(spec: WorkerSpec, num_spares: int) -> None:
    """A run that ends with its first worker has no use for spares.

    Raises:
        NotAvailableError: says why it would.
    """
    if not num_spares or spec.is_recoverable:
        return
    got, cause = why_not_recoverable(spec)
    raise NotAvailableError(
        "a spare worker cannot take over here",
        got=f"spare_workers={num_spares}, {got}",
        cause=cause,
        fix='sync="replicate", or leave spare_workers out and save checkpoints',
    )
