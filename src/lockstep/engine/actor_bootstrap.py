# SPDX-License-Identifier: Apache-2.0
"""What the process of every actor does first."""

from __future__ import annotations

import signal

from lockstep.imports import import_for_good, no_collections


def settle_in(module: str) -> None:
    """Import what the actor needs, torch with it and its compiler left out.

    Ray ends actors with SIGTERM, and its handler prints a traceback into the user's terminal,
    before the error that the actors were ended for: the signal's own effect is put back.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with no_collections():
        from lockstep.lazy_dynamo_import import import_compiler_lazily

        import_compiler_lazily()
        import_for_good(module)
