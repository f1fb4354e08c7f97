# SPDX-License-Identifier: Apache-2.0
"""Processes that run programs: one that hangs or dies takes nothing along but its program."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
from contextlib import suppress
from typing import Any

from soak.judging import Outcome
from soak.spec import Spec

ANSWER_WITHIN_S = 60.0
ANSWER_WITHIN_S_ON_RAY = 240.0


def serve(pipe: Any) -> None:
    """Run one program after the other, until there is none."""
    import torch

    from soak.running import Runner

    torch.set_num_threads(1)
    runner = Runner()
    try:
        while (given := pipe.recv()) is not None:
            # Where every thread stands, shortly before nobody waits for it any more.
            faulthandler.dump_traceback_later(0.9 * ANSWER_WITHIN_S)
            pipe.send((runner.run(Spec.from_json(given)), runner.is_tainted))
            faulthandler.cancel_dump_traceback_later()
    except EOFError:
        pass
    runner.close()
    if "ray" in sys.modules:
        from soak import on_ray

        on_ray.stop()


class Member:
    """One process, made again when it ends."""

    def __init__(self) -> None:
        # Not forked: torch's threads would be gone there.
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Any = None

    def run(self, spec: Spec) -> Outcome:
        """The program's outcome, also if it takes the process with it."""
        if self._process is None:
            self._start()
        try:
            self._pipe.send(spec.to_json())
            is_slow = "strikes" in spec.options
            if not self._pipe.poll(ANSWER_WITHIN_S_ON_RAY if is_slow else ANSWER_WITHIN_S):
                self.end()
                return Outcome("hang", "process", "the process does not answer")
            outcome, is_tainted = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.end()
            return Outcome("crash", f"process ended with {code}")
        if is_tainted:
            self.end()
        return outcome

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=serve, args=(theirs,))
        # DDP has advice on each program. torch reads this when it is imported.
        before = os.environ.get("TORCH_CPP_LOG_LEVEL")
        os.environ["TORCH_CPP_LOG_LEVEL"] = before or "ERROR"
        self._process.start()
        if before is None:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
        theirs.close()

    def leave(self) -> None:
        """When it has nothing to do: it lets go of what it holds."""
        if self._process is not None:
            with suppress(OSError):
                self._pipe.send(None)
            self._process.join(15)
        self.end()

    def end(self) -> None:
        """Now, whatever it does."""
        if self._process is not None:
            self._process.kill()  # its own ranks hear of it, and end
            self._process.join()
            self._pipe.close()
        self._process = None
