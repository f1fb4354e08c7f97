# SPDX-License-Identifier: Apache-2.0
"""`Spare`: a started worker without a rank, which runs its `setup` or has run it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import cloudpickle

import ray
from lockstep.engine.ray_errors import ACTOR_DEATHS, ACTOR_NEVER_STARTED, death_reason
from lockstep.errors import ConfigurationError, WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import Outcome, StartReport
    from ray import ObjectRef


_log = logging.getLogger("lockstep.recovery")

Sources = dict[str, set[int]]
"""The digests of each module, by its name."""


class Readiness(Enum):
    """Whether a spare has run its `setup`."""

    STARTING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(eq=False)
class Spare:
    """A worker that was started and has no rank.

    Attributes:
        handle: the worker.
        place_ref: the reference of the id of its node and the name of its actor, which are known
            before its `stand_by` begins.
        start_ref: the reference of the outcome of its `stand_by`.
        sources: by node, the digests of each module of the user's program that members there have.
        error: why it cannot become a member, once `readiness` has returned FAILED.
    """

    handle: WorkerHandle
    place_ref: ObjectRef[tuple[str, str]]
    start_ref: ObjectRef[Outcome]
    sources: Mapping[str, Sources]
    error: BaseException | None = field(default=None, init=False)

    def readiness(self) -> Readiness:
        """Whether the spare is ready; never blocks for its `setup`."""
        if self.error is not None:
            return Readiness.FAILED
        if not ray.wait([self.start_ref], timeout=0)[0]:
            return Readiness.STARTING
        try:
            outcome = ray.get(self.start_ref)
            self.error = outcome.exception()
            if self.error is None and not self.handle.pid:
                report: StartReport = cloudpickle.loads(outcome.value)
                self.handle.node, self.handle.name = ray.get(self.place_ref)
                self.handle.pid = report.pid
                self.error = self._other_source_error(report)
        except (*ACTOR_DEATHS, *ACTOR_NEVER_STARTED) as failure:
            self.error = WorkerDiedError(
                f"{self.handle} died before it was ready", cause=death_reason(failure)
            )
            self.error.__cause__ = failure
        return Readiness.READY if self.error is None else Readiness.FAILED

    def _other_source_error(self, report: StartReport) -> ConfigurationError | None:
        """The error of a process that has imported what no member on its node has.

        Files may well differ by node (settings of a host): on a node without members that is told
        of, and no more.
        """
        node = self.handle.node
        of_node = [self.sources[node]] if node in self.sources else [*self.sources.values()]
        known = {
            name: {d for each in of_node for d in each.get(name, ())} for name in report.sources
        }
        edited = [n for n, digest in report.sources.items() if known[n] and digest not in known[n]]
        if not edited:
            return None
        error = ConfigurationError(
            "a new worker has imported another version of the program than the workers train",
            where=str(self.handle),
            got=f"other source of {', '.join(sorted(edited))}",
            cause="a module was edited since the run began",
            fix="put the files back as they were at the start; or save, and resume with a new"
            " trainer, whose workers all import the new ones",
        )
        if node in self.sources:
            return error
        _log.warning("%s", error)
        return None
