# SPDX-License-Identifier: Apache-2.0
"""`ProgressBar`: one tqdm bar on the driver for all workers."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.worker import ProgressReport


def wants_bar(asked: bool) -> bool:
    """Whether to draw a bar: if asked for, and in a terminal or a notebook."""
    return asked and (sys.stderr.isatty() or _in_notebook())


def _in_notebook() -> bool:
    # Only a kernel's process has imported `ipykernel`; hosted notebooks subclass its shell.
    kernel, ipython = sys.modules.get("ipykernel.zmqshell"), sys.modules.get("IPython")
    if kernel is None or ipython is None:
        return False
    return isinstance(ipython.get_ipython(), kernel.ZMQInteractiveShell)


def _bar_class() -> Any:
    """tqdm's widget in a notebook with ipywidgets, otherwise its text bar.

    As `tqdm.auto` chooses, but without its warning in notebooks without ipywidgets.
    """
    if _in_notebook() and find_spec("ipywidgets") is None:
        from tqdm.std import tqdm
    else:
        from tqdm.auto import tqdm
    return tqdm


class ProgressBar:
    """Shows steps done, the latest loss, and samples per second over all workers.

    Args:
        description: the text before the numbers.
    """

    def __init__(self, description: str) -> None:
        self._bar = _bar_class()(desc=description, unit="step", leave=False)
        self._began = time.monotonic()

    def show(self, progress: ProgressReport) -> None:
        """Show what rank 0 reports; the other ranks are in the same step."""
        if not progress.steps:
            return
        seconds = max(time.monotonic() - self._began, 1e-9)
        shown = {"samples/s": f"{progress.samples / seconds:.0f}"}
        if progress.loss is not None:
            shown["loss"] = f"{progress.loss:.4f}"
        self._bar.total = progress.total_steps
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(progress.steps - self._bar.n)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
