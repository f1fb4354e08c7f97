# SPDX-License-Identifier: Apache-2.0
"""Where workers live: in this process, or in Ray actors."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.engine.engine_protocol import Engine, PoolStatus, Resources
from lockstep.errors import NotAvailableError
from lockstep.import_without_gc import gc_paused

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
    """Whether the only worker fits into this process."""
    fits = not resources.custom_resources and (gpu_here or not spec.use_gpu)
    return spec.num_workers == 1 and (use_local or fits)


def start_ray_engine(
    spec: WorkerSpec, resources: Resources, *, use_local: bool, num_spares: int
) -> RayEngine:
    """Workers in Ray actors.

    Raises:
        NotAvailableError: Ray is not installed.
    """
    with _require_ray():
        from lockstep.engine.ray_engine import RayEngine
    return RayEngine(spec, resources, use_local=use_local, num_spares=num_spares)


def has_gpus_elsewhere(count: int) -> bool:
    """Whether other machines of the cluster have so many GPUs: torch knows those here.

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
        with gc_paused():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ray":
            raise
        raise NotAvailableError(
            "several workers need Ray, which is not installed",
            fix='pip install "lockstep-train[ray]"',
        ) from error
