# SPDX-License-Identifier: Apache-2.0
"""Writes a trace of torch's profiler from each worker, for ``train(profile="folder")``."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import WrongTypeError
from lockstep.worker import Worker, discard_trace, run_counts, start_tracing, stop_tracing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.trainer.worker_calls import WorkerCalls

Profile = bool | str | os.PathLike[str]
"""Whether to time the phases of a call, or the path of a folder for traces."""


@contextmanager
def trace_workers(workers: WorkerCalls, profile: Profile, name: str) -> Iterator[None]:
    """Inside, trace the workers, if `profile` is a folder, which is made if missing.

    Args:
        name: the prefix of the files' names.
    """
    if isinstance(profile, bool):
        yield
        return
    if not isinstance(profile, str | os.PathLike):
        raise WrongTypeError(
            "profile is neither a bool nor a folder",
            got=f"{type(profile).__name__}: {profile!r:.60}",
            fix='profile=True for times, profile="traces" for times and traces',
        )
    folder = Path(profile)
    folder.mkdir(parents=True, exist_ok=True)  # first: an unusable one costs no training
    workers.call(Worker.call.with_args(start_tracing))
    try:
        yield
    except BaseException:
        # Any call would first wait until all workers have left the one that failed.
        workers.defer(Worker.call.with_args(discard_trace))
        raise
    traces = workers.call(Worker.call.with_args(stop_tracing))
    step = workers.call_rank_0(run_counts.with_args()).steps
    for rank, trace in enumerate(traces):
        if trace is not None:
            # TensorBoard's profiler, Perfetto and chrome://tracing open it by this name.
            file = f"{name}-step{step}-rank{rank}.pt.trace.json.gz"
            (folder / file).write_bytes(trace)
