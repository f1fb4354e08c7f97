# SPDX-License-Identifier: Apache-2.0
"""Where workers live: in this process, or in Ray actors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.engine.base import Engine
from lockstep.engine.imports import no_collections
from lockstep.errors import NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.worker import WorkerSpec

__all__ = ["Engine", "Resources", "open_engine", "split_dataset"]


@dataclass(frozen=True)
class Resources:
    """What one worker asks of a cluster, and how the ranks reach each other.

    Attributes:
        further: Ray resources besides CPU and GPU, by name.
        timeout_s: bound of every collective, in seconds.
    """

    num_cpus: float
    num_gpus: float
    further: Mapping[str, float] | None
    backend: str
    timeout_s: float


def open_engine(
    spec: WorkerSpec, resources: Resources, *, use_local: bool, gpu_here: bool
) -> Engine:
    """One worker that fits into this process stays in it; the others become Ray actors."""
    stays = not resources.further and (gpu_here or not spec.use_gpu)
    if spec.num_workers == 1 and (use_local or stays):
        from lockstep.engine.inline import InlineEngine

        return InlineEngine(spec)
    try:
        with no_collections():
            from lockstep.engine.ray import RayEngine
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ray":
            raise
        raise NotAvailableError(
            "several workers need Ray, which is not installed",
            fix='pip install "lockstep-train[ray]"',
        ) from error
    return RayEngine(spec, resources, use_local=use_local)


def split_dataset(dataset: Any, num_workers: int, held_cpus: float) -> list[Any]:
    """See `lockstep.engine.streaming.split`. Who has a Ray dataset has Ray."""
    from lockstep.engine import streaming

    return streaming.split(dataset, num_workers, held_cpus)
