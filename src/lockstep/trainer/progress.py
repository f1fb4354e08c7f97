# SPDX-License-Identifier: Apache-2.0
"""One progress bar, on the driver, for all workers."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import Any


def wants_bar(asked: bool) -> bool:
    """A bar is drawn where somebody looks: a terminal or a notebook."""
    return asked and (sys.stderr.isatty() or _in_notebook())


def _in_notebook() -> bool:
    # Only a kernel's process has imported it; hosted notebooks have shells that derive from it.
    kernel, ipython = sys.modules.get("ipykernel.zmqshell"), sys.modules.get("IPython")
    if kernel is None or ipython is None:
        return False
    return isinstance(ipython.get_ipython(), kernel.ZMQInteractiveShell)


def _bar_class() -> Any:
    """tqdm's widget in a notebook where widgets can be drawn, its line of text elsewhere.

    tqdm's own choice is the same, but for a warning in notebooks without ipywidgets.
    """
    if _in_notebook() and find_spec("ipywidgets") is None:
        from tqdm.std import tqdm
    else:
        from tqdm.auto import tqdm
    return tqdm


class ProgressBar:
    """Steps done of `total`, latest loss, samples per second over all workers."""

    def __init__(self, description: str, total: int | None) -> None:
        self._bar = _bar_class()(desc=description, total=total, unit="step", leave=False)
        self._since = time.monotonic()

    def watch(self, progress: dict[str, Any]) -> int:
        """Take over what rank 0 reports; the other ranks are in the same step."""
        steps = progress.get("steps", 0)
        if not steps:
            return 0
        seconds = max(time.monotonic() - self._since, 1e-9)
        shown = {"samples/s": f"{progress['samples'] / seconds:.0f}"}
        if progress.get("loss") is not None:
            shown["loss"] = f"{float(progress['loss']):.4f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(steps - self._bar.n)
        return 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
