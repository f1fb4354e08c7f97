# SPDX-License-Identifier: Apache-2.0
"""`RunAudit`: records the gradients and weights of optimizer steps, for the driver to compare.

The audit only reads, and does not communicate. Its hooks are in torch only while the operator's
`setup` and training loop run, so that it watches nothing else of the user's process. The records go
to the driver with the worker's report (see `lockstep.audit.ledger`).
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lockstep.audit.probe.hooking import hook_in
from lockstep.audit.probe.probe import Probe, TrainersRun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.audit.ledger import Ledger
    from lockstep.operator.training_parts import TrainingParts
    from lockstep.worker.spec import WorkerSpec


WATCHED_EVERY: Final = 64
"""Steps between two comparisons of the replicas; the first steps are compared more often. Replicas
that have drifted apart stay apart, so a later comparison still finds them."""


class RunAudit:
    """The audit of one worker in one generation of the group.

    Without `attach` (in a copy that `verify` makes, or with ``audit="off"``) it does nothing.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._mode = spec.audit
        self._synchronised = spec.options.wrap_ddp
        self._splits_data = spec.options.add_dist_sampler
        self._probe: Probe | None = None
        self._before: dict[str, int] = {}

    def attach(self, rank: int, world_size: int, steps_before: int) -> None:
        """Start the records of a generation of the group.

        Args:
            steps_before: optimizer steps of the run so far; the same on every rank.
        """
        self.detach()
        if self._mode != "off":
            run = TrainersRun(
                rank,
                world_size,
                synchronised=self._synchronised,
                shares_out=self._splits_data,
                first_step=steps_before,
                rarest=1 if self._mode == "full" else WATCHED_EVERY,
            )
            self._probe = Probe(mode=self._mode, run=run)

    def detach(self) -> None:
        """Drop the records of a generation whose group is left or lost. Idempotent."""
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.stop()

    @contextmanager
    def during_setup(self) -> Iterator[None]:
        """Watch `setup` where the user makes a wrapper; lockstep's own wrappers need no audit."""
        if self._synchronised:
            yield
        else:
            with self._hook_torch():
                yield

    @contextmanager
    def during_training(self, run: TrainingParts) -> Iterator[None]:
        """Watch the training loop of an operator."""
        if self._probe is not None and self._probe.run is not None:
            self._probe.run.modules = run.plain_modules()
            self._probe.run.optimizers = run.optimizers
            for track in self._probe.ledger.tracks:
                # The records of the next call begin with the last step of this one.
                track.steps = track.steps[-1:]
                self._before[track.key] = len(track.steps)
        with self._hook_torch():
            yield

    @contextmanager
    def _hook_torch(self) -> Iterator[None]:
        probe = self._probe
        if probe is None or probe.run is None:
            yield
            return
        probe.run.thread = threading.get_ident()
        hook_in(probe)
        try:
            yield
        finally:
            probe.pause()

    def seen(self) -> Ledger | None:
        """The records of the last call, copied for the driver; None without an audit."""
        if self._probe is None:
            return None
        ledger = self._probe.ledger
        ledger.facts.lockstep = self._synchronised
        ledger.facts.looked = any(len(t.steps) > self._before.get(t.key, 0) for t in ledger.tracks)
        tracks = [replace(track, steps=list(track.steps)) for track in ledger.tracks]
        return replace(ledger, tracks=tracks, loadings=list(ledger.loadings))
