# SPDX-License-Identifier: Apache-2.0
"""The driver's engines: one calls a worker in this process, one calls workers in Ray actors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.engine.engine_protocol import Engine, PoolStatus, Resources
from lockstep.errors import NotAvailableError
from lockstep.paused_gc import pause_gc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.engine.ray_engine import RayEngine
    from lockstep.worker import WorkerSpec

__all__ = [
    "Engine",
    "PoolStatus",
    "Resources",
    "has_gpus_elsewhere",
    "runs_in_driver",
    "start_ray_engine",
]


def runs_in_driver(
    spec: WorkerSpec, resources: Resources, *, use_local: bool, gpu_here: bool
) -> bool:
    """Whether the run has one worker only, and this process has the resources that it asks for."""
    fits = not resources.custom_resources and (gpu_here or not spec.use_gpu)
    return spec.num_workers == 1 and (use_local or fits)


def start_ray_engine(
    spec: WorkerSpec, resources: Resources, *, use_local: bool, num_spares: int
) -> RayEngine:
    """Start workers in Ray actors.

    Raises:
        NotAvailableError: Ray is not installed.
    """
    with _require_ray():
        from lockstep.engine.ray_engine import RayEngine
    return RayEngine(spec, resources, use_local=use_local, num_spares=num_spares)


def has_gpus_elsewhere(count: int) -> bool:
    """Whether other machines of the cluster have `count` GPUs; torch counts the GPUs of this one.

    Raises:
        NotAvailableError: Ray is not installed.
    """
    with _require_ray():
        from lockstep.engine import cluster
    cluster.connect()
    return cluster.gpus_of_other_machines() >= count


@contextmanager
def _require_ray() -> Iterator[None]:
    try:
        with pause_gc():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ray":
            raise
        raise NotAvailableError(
            "several workers need Ray, which is not installed",
            fix='pip install "lockstep-train[ray]"',
        ) from error
