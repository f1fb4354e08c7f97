# SPDX-License-Identifier: Apache-2.0
"""One rank of an audited run: the script, the probe, and where the ledger goes.

Under our own launcher the ledger is a file in its folder, which the launcher judges when all ranks
have ended; nothing is exchanged. Under another launcher it goes through the store that the process
group was made with, and rank 0 reports.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.audit.importing import when_imported
from lockstep.audit.script import describe_failure, run_module, run_script

if TYPE_CHECKING:
    from lockstep.audit.finding import Place
    from lockstep.audit.ledger import Ledger
    from lockstep.audit.options import Options
    from lockstep.audit.probe.probe import Probe

FOLDER = "LOCKSTEP_AUDIT_FOLDER"
PIPE = "LOCKSTEP_AUDIT_PIPE"

DUMP = b"d"
_TRIES = 5


class Rank:
    """This process's part of the run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = os.environ.get(FOLDER)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.probe: Probe | None = None
        self._pid = os.getpid()
        self._writing = threading.Lock()

    def begin_report(self) -> None:
        """Under another launcher: whatever ends this rank, the JSON file is not an older run's."""
        if self.folder is None and self.rank == 0:
            from lockstep.audit.outcome import write_nothing_found

            write_nothing_found(self.options.json, self.world_size)

    def run(self) -> int:
        """Run the script to its end, and hand in the ledger. Returns the exit code."""
        if self.folder is not None:
            self._listen()
        else:
            self._report_when_terminated()
        self._hand_in_before_leaving_at_once()
        when_imported("torch", self._start)
        run = run_module if self.options.is_module else run_script
        code = run(
            self.options.script,
            self.options.arguments,
            self._note_failure,
            launched=self.folder is not None,
        )
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        if os.getpid() != self._pid:
            return code  # a child of `os.fork`, which left through the end of the script
        if self.folder is not None and _has_threads():
            # One of them may be what trains: Python waits for them next, and then calls this.
            atexit.register(self._hand_in, code)
            return code
        return self._hand_in(code)

    def _start(self) -> None:
        from lockstep.audit.probe.hooking import hook_in
        from lockstep.audit.probe.probe import Probe
        from lockstep.audit.spawned import watch_children

        self.probe = Probe(steps=self.options.steps, when_done=self._enough, keeps_groups=True)
        # The script may have changed its environment before it imported torch.
        self.probe.ledger.rank, self.probe.ledger.world_size = self.rank, self.world_size
        hook_in(self.probe)
        if self.folder is not None:
            watch_children(self.probe, self.folder, self.options.steps)

    def _note_failure(self, error: BaseException, where: list[Place]) -> None:
        if self.probe is not None:
            self.probe.ledger.failure = describe_failure(error)
            self.probe.ledger.failed_at = time.time()
            self.probe.ledger.stack = where

    def _enough(self) -> None:
        """The steps that were asked for are in: the launcher can judge, the script goes on."""
        if self.probe is not None and self.folder is not None:
            self.write(self.probe.ledger)

    def _hand_in(self, code: int) -> int:
        ledger = self._ledger()
        if ledger is None:
            return code
        ledger.exit_code = code
        if code == 0 and ledger.failure is None:
            ledger.stuck_in = None  # what a collective raised was caught
        if self.folder is not None:
            self.write(ledger)
            return code
        return self._report(ledger, code)

    def _ledger(self) -> Ledger | None:
        """None if torch was never imported: then there is nothing to tell."""
        if self.probe is not None:
            from lockstep.audit.session import finish

            return finish(self.probe)
        if "torch" not in sys.modules:
            return None
        from lockstep.audit.ledger import Ledger

        # Whatever brought it about: "nothing was found" would be said of what was not looked at.
        blind = {"blind": "torch was imported in a way that the audit does not notice"}
        return Ledger(rank=self.rank, world_size=self.world_size, facts=blind)

    def write(self, ledger: Ledger) -> None:
        """As a file, all or nothing. The program may change the ledger meanwhile."""
        assert self.folder is not None
        path = Path(self.folder) / f"rank{self.rank}.json"
        with self._writing:
            for left in reversed(range(_TRIES)):
                try:
                    data = ledger.to_bytes()
                except RuntimeError:  # something was added while it was read
                    if not left:
                        return
                    continue
                partial = path.with_suffix(".partial")
                partial.write_bytes(data)
                partial.replace(path)
                return

    # -- our own launcher ---------------------------------------------------------------------

    def _listen(self) -> None:
        """Write when the launcher asks; end with it, so that no rank is orphaned."""
        pipe = os.environ.pop(PIPE, None)
        if pipe is not None:
            ours = int(pipe), os.fstat(int(pipe))
            threading.Thread(
                target=self._obey, args=ours, name="lockstep.audit", daemon=True
            ).start()

    def _obey(self, pipe: int, as_given: os.stat_result) -> None:
        # A script may close all files that it did not open, and open others: while a read waits
        # the pipe stays what it is, and before each it has to be asked.
        with contextlib.suppress(OSError):
            while os.path.samestat(as_given, os.fstat(pipe)):
                if os.read(pipe, 1) == DUMP:
                    self._write_where_it_stands()
                elif os.path.samestat(as_given, os.fstat(pipe)):
                    # The launcher was killed, and tidies up no more.
                    shutil.rmtree(str(self.folder), ignore_errors=True)
                    os.killpg(0, signal.SIGKILL)

    def _write_where_it_stands(self) -> None:
        if self.probe is None:
            return
        from lockstep.audit.session import stack_of_main_thread

        ledger = self.probe.ledger
        if ledger.failure is None:
            ledger.stack = stack_of_main_thread()
        self.write(ledger)

    # -- another launcher ---------------------------------------------------------------------

    def _report(self, ledger: Ledger, code: int) -> int:
        from lockstep.audit.outcome import exit_code_of, report
        from lockstep.audit.session import exchange_by_store

        store = self.probe.store if self.probe is not None else None
        wait_s = 10.0 if code else 60.0
        everyone = exchange_by_store(ledger.to_bytes(), store, self.rank, self.world_size, wait_s)
        if self.rank == 0:
            findings = report(self.options, self._read(everyone), self.world_size)
        else:
            from lockstep.audit.judgement import judge

            findings = judge(
                self._read(everyone), only=self.options.only, ignore=self.options.ignore
            )
        return code or exit_code_of(findings, self.options.fail_on or "never")

    def _read(self, everyone: list[bytes | None]) -> list[Ledger | None]:
        from lockstep.audit.ledger import Ledger

        return [None if data is None else Ledger.from_bytes(data) for data in everyone]

    def _hand_in_before_leaving_at_once(self) -> None:
        leave = os._exit

        def watched(status: int) -> Any:
            code = status
            if os.getpid() == self._pid:
                with contextlib.suppress(Exception):
                    code = self._leave_at_once(status)
            leave(code)

        os._exit = watched

    def _leave_at_once(self, status: int) -> int:
        ledger = self._ledger() if self.probe is None else self.probe.ledger
        if ledger is None:
            return status
        if self.folder is None:
            # Another thread ends the program in need: that is not kept waiting for the other ranks.
            from_main_thread = threading.current_thread() is threading.main_thread()
            return self._hand_in(status) if from_main_thread else status
        ledger.exit_code = status
        self.write(ledger)
        return status

    def _report_when_terminated(self) -> None:
        """Launchers terminate the others when one rank fails: rank 0 writes what it knows first.

        A handler in Python waits for the main thread, which may wait for its peers for ever; so
        a thread is woken by the signal itself.
        """
        if self.rank != 0 or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

        def wake(number: int, frame: object) -> None:
            """The thread below does the work."""

        signal.signal(signal.SIGTERM, wake)

        def wait() -> None:
            while os.read(reading, 1) != bytes([signal.SIGTERM]):
                pass
            if signal.getsignal(signal.SIGTERM) is not wake:
                return  # the program has a handler of its own, and may be saving
            if self.probe is not None:
                from lockstep.audit.outcome import report
                from lockstep.audit.session import stack_of_main_thread

                ledger = self.probe.ledger
                ledger.stack = stack_of_main_thread()
                with contextlib.suppress(Exception):
                    others: list[Ledger | None] = [None] * (self.world_size - 1)
                    report(self.options, [ledger, *others], self.world_size)
            os._exit(128 + signal.SIGTERM)

        threading.Thread(target=wait, name="lockstep.audit", daemon=True).start()


def _has_threads() -> bool:
    """Are there threads that Python waits for before it ends?"""
    others = (t for t in threading.enumerate() if t is not threading.main_thread())
    return any(not thread.daemon for thread in others)
