# SPDX-License-Identifier: Apache-2.0
"""Starts a trainer's workers: chooses the engine, GPUs and the backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lockstep.engine import has_gpus_elsewhere, runs_in_driver, start_ray_engine
from lockstep.engine.inline_engine import InlineEngine
from lockstep.errors import NotAvailableError
from lockstep.trainer.argument_checks import check_numbers, check_resources, pick_backend

if TYPE_CHECKING:
    from lockstep.engine import Engine, Resources
    from lockstep.worker import WorkerSpec


@dataclass(frozen=True)
class Placement:
    """The arguments of a trainer that decide where its workers live.

    Attributes:
        resources: the resources of each worker; `backend` is the user's argument.
        use_gpu: the user's argument: True, False or "auto".
        use_local: rank 0 lives in this process.
        num_spares: the number of spares.
        min_workers: the fewest workers with which the run goes on after a loss.
        hang_timeout_s: how long a worker may stay at one step while others wait for it.

    Raises:
        ConfigurationError: a resource or a time is no number above zero.
    """

    resources: Resources
    use_gpu: bool | str
    use_local: bool
    num_spares: int
    min_workers: int
    hang_timeout_s: float

    def __post_init__(self) -> None:
        check_numbers(
            num_cpus_per_worker=self.resources.num_cpus,
            timeout_s=self.resources.timeout_s,
            hang_timeout_s=self.hang_timeout_s,
        )
        check_resources(self.resources.custom_resources)

    def resolve_gpus(self, spec: WorkerSpec) -> WorkerSpec:
        """Set `use_gpu` in `spec` if "auto" finds a GPU for each worker on other machines.

        A driver often runs on a head node without GPUs.

        Raises:
            NotAvailableError: spares were asked for, and a lost worker cannot be replaced.
        """
        _refuse_spares(spec, self.num_spares)  # before Ray is started
        num_bundles = 0 if self.use_local else spec.num_workers + self.num_spares
        if self.use_gpu == "auto" and not spec.use_gpu and num_bundles > 1:
            return replace(spec, use_gpu=has_gpus_elsewhere(num_bundles))
        return spec


def start_workers(spec: WorkerSpec, placement: Placement) -> Engine:
    """Start the workers: a lone worker in this process where possible, otherwise Ray actors."""
    backend = pick_backend(placement.resources.backend, spec.use_gpu)
    resources, use_local = replace(placement.resources, backend=backend), placement.use_local
    if runs_in_driver(spec, resources, use_local=use_local, gpu_here=torch.cuda.is_available()):
        return InlineEngine(spec)
    engine = start_ray_engine(spec, resources, use_local=use_local, num_spares=placement.num_spares)
    if not spec.can_go_back:
        return engine
    # Imported here: the module needs Ray.
    from lockstep.recovery.recovering_engine import RecoveringEngine

    return RecoveringEngine(engine, placement.min_workers, placement.hang_timeout_s)


def _refuse_spares(spec: WorkerSpec, num_spares: int) -> None:
    """Refuse spares for a run that cannot go on after the loss of a worker.

    Raises:
        NotAvailableError: names the argument that keeps the run from going on.
    """
    if not num_spares or spec.obstacle is None:
        return
    got, cause = spec.obstacle
    raise NotAvailableError(
        "a spare worker cannot take over here",
        got=f"spare_workers={num_spares}, {got}",
        cause=cause,
        fix='memory_checkpoint_every="auto"'
        if spec.options.sync == "fsdp"
        else 'sync="replicate", or leave spare_workers out and save checkpoints',
    )
