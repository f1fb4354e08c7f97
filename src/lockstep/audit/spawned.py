# SPDX-License-Identifier: Apache-2.0
"""Ranks that a script starts itself, with ``torch.multiprocessing.spawn``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.audit.script import describe_failure, lines_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.audit.probe.probe import Probe


class Watched:
    """A function that runs under a probe of its own, in a process that the script started."""

    def __init__(self, function: Callable[..., Any], folder: str, steps: int | None) -> None:
        self.function = function
        self.folder = folder
        self.steps = steps

    def __call__(self, index: int, *args: Any) -> Any:
        from lockstep.audit.probe.hooking import hook_in
        from lockstep.audit.probe.probe import Probe
        from lockstep.audit.session import finish

        probe = Probe(steps=self.steps, keeps_groups=True)
        hook_in(probe)
        try:
            return self.function(index, *args)
        except BaseException as error:
            probe.ledger.failure = describe_failure(error)
            probe.ledger.failed_at = time.time()
            probe.ledger.stack = lines_of(error)
            raise
        finally:
            ledger = finish(probe)
            if not ledger.started_group:
                ledger.rank = index
            path = Path(self.folder) / f"spawned{os.getpid()}.json"
            path.with_suffix(".partial").write_bytes(ledger.to_bytes())
            path.with_suffix(".partial").replace(path)


def watch_children(probe: Probe, folder: str, steps: int | None) -> None:
    """From now on, what the script spawns is watched as well."""
    import torch.multiprocessing

    module = sys.modules["torch.multiprocessing.spawn"]

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(fn: Any, *args: Any, **kwargs: Any) -> Any:
            probe.ledger.facts["spawns"] = True
            return original(Watched(fn, folder, steps), *args, **kwargs)

        return watched

    probe.patches.wrap(module, "start_processes", around)
    probe.patches.wrap(torch.multiprocessing, "start_processes", around)
