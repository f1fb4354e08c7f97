# SPDX-License-Identifier: Apache-2.0
"""``train(profile="folder")``: a trace of torch's profiler from each worker, on this machine."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import TrainerClosedError, WrongTypeError
from lockstep.trainer.callbacks import steps_done
from lockstep.worker import start_tracing, stop_tracing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.trainer import TorchTrainer

Profile = bool | str | os.PathLike[str]
"""Whether to time the phases of a call; as the path of a folder, with a trace in it."""


@contextmanager
def traced(trainer: TorchTrainer, profile: Profile, purpose: str) -> Iterator[None]:
    """Trace what the workers do inside, if `profile` is a folder; it is made."""
    if isinstance(profile, bool):
        yield
        return
    if not isinstance(profile, str | os.PathLike):
        raise WrongTypeError(
            "profile is neither a bool nor a folder",
            got=f"{type(profile).__name__}: {profile!r:.60}",
            fix='profile=True for times, profile="traces" for times and traces',
        )
    trainer.apply_all_workers(start_tracing)
    try:
        yield
    except BaseException:
        with suppress(TrainerClosedError):
            trainer.apply_all_workers(stop_tracing)
        raise
    folder = Path(profile)
    folder.mkdir(parents=True, exist_ok=True)
    step = steps_done(trainer)
    for rank, trace in enumerate(trainer.apply_all_workers(stop_tracing)):
        if trace is not None:
            # TensorBoard's profiler, Perfetto and chrome://tracing open it by this name.
            name = f"{purpose}-step{step}-rank{rank}.pt.trace.json.gz"
            (folder / name).write_bytes(trace)
