# SPDX-License-Identifier: Apache-2.0
"""One progress bar, on the driver, for all workers."""

from __future__ import annotations

import sys
import time
from typing import Any


def wants_bar(asked: bool) -> bool:
    """A bar is drawn where somebody looks: a terminal or a notebook."""
    return asked and (sys.stderr.isatty() or _in_notebook())


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    if shell is None:
        return False
    return type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


class ProgressBar:
    """Steps done of `total`, latest loss, samples per second over all workers."""

    def __init__(self, description: str, total: int | None) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(desc=description, total=total, unit="step", leave=False)
        self._since = time.monotonic()

    def watch(self, progress: dict[str, Any]) -> None:
        """Take over what rank 0 reports; the other ranks are in the same step."""
        steps = progress.get("steps", 0)
        if not steps:
            return
        seconds = max(time.monotonic() - self._since, 1e-9)
        shown = {"samples/s": f"{progress['samples'] / seconds:.0f}"}
        if progress.get("loss") is not None:
            shown["loss"] = f"{float(progress['loss']):.4f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(steps - self._bar.n)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
