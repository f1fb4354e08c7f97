# SPDX-License-Identifier: Apache-2.0
"""Prepares the process of an actor: the handler of SIGTERM, and imports that take little time."""

from __future__ import annotations

import signal

from lockstep.paused_gc import import_and_freeze, pause_gc


def set_up_actor_process(module: str) -> None:
    """Import `module`, and torch without its compiler, in an actor's process; restore SIGTERM.

    Ray ends actors with SIGTERM, and its handler prints a traceback into the user's terminal, ahead
    of the error that caused the shutdown. So the default action of SIGTERM is restored.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pause_gc():
        from lockstep.lazy_dynamo_import import import_compiler_lazily

        import_compiler_lazily()
        import_and_freeze(module)
