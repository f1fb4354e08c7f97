# SPDX-License-Identifier: Apache-2.0
"""Starts and stops torch's profiler in a worker's process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import profiler

_running: profiler.profile | None = None


def start_tracing() -> None:
    """Record every operation of this process from now on."""
    global _running
    discard_trace()  # of another trainer in this process, whose call has failed
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
    _running = profiler.profile(activities=activities)
    _running.start()


def stop_tracing() -> bytes | None:
    """The trace since `start_tracing`, as gzipped JSON; None if tracing was not started here."""
    global _running
    ended, _running = _running, None
    if ended is None:
        return None
    ended.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json.gz")
        ended.export_chrome_trace(str(path))
        return path.read_bytes()


def discard_trace() -> None:
    """Record nothing any more, and drop the trace, if there is one."""
    global _running
    ended, _running = _running, None
    if ended is not None:
        ended.stop()
