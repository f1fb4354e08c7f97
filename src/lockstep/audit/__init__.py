# SPDX-License-Identifier: Apache-2.0
"""Watch a training program, and name what is silently wrong between its ranks.

``lockstep audit train.py`` runs any script; in code `watching` does it, or `start` and `stop`.
Needs torch alone.

From below: `probe` hooks into torch and fills one `ledger` per rank; `world` lays the ledgers of
all ranks side by side; `rules` judge them; `report` shows the findings; `launch` runs scripts.
Importing this package imports no torch: a script may have to set things before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.audit.finding import Finding, Place
    from lockstep.audit.session import start, stop
    from lockstep.audit.watched_block import watching

__all__ = ["Finding", "Place", "start", "stop", "watching"]

_HOME = {
    "Finding": "finding",
    "Place": "finding",
    "start": "session",
    "stop": "session",
    "watching": "watched_block",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
