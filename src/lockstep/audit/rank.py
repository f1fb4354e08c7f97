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
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.audit.exit_codes import BLIND
from lockstep.audit.importing import when_imported
from lockstep.audit.ledger import Ledger, LedgerFile, read_ledger
from lockstep.audit.probe.frames import stack_of_main_thread
from lockstep.audit.processor_time import computed_in_session_s
from lockstep.audit.script import describe_failure, run_module, run_script
from lockstep.audit.spawned import Children
from lockstep.audit.together import with_spawned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.audit.finding import Place
    from lockstep.audit.options import Options
    from lockstep.audit.probe.probe import Probe

FOLDER = "LOCKSTEP_AUDIT_FOLDER"
PIPE = "LOCKSTEP_AUDIT_PIPE"

DUMP = b"d"
DONE = ".done"
"""How the file ends by which a rank tells that it is not watched any more."""


class Rank:
    """This process's part of the run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = os.environ.get(FOLDER)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.probe: Probe | None = None
        self._pid = os.getpid()
        # Where processes that the script starts leave their ledgers; made when one is.
        made = Path(tempfile.gettempdir(), f"lockstep-audit-{uuid.uuid4().hex}")
        place = made if self.folder is None else Path(self.folder)
        self.children = Children(place, self.rank, options.steps, lambda: self.probe)
        self._file = LedgerFile(place / f"rank{self.rank}.json")

    def begin_report(self) -> None:
        """Under another launcher: whatever ends this rank, the JSON file is not an older run's."""
        if self.folder is None and self.rank == 0:
            from lockstep.audit.outcome import write_nothing_found

            write_nothing_found(self.options.files, self.world_size)

    def run(self) -> int:
        """Run the script to its end, and hand in the ledger. Returns the exit code."""
        if self.folder is not None:
            self._listen()
        else:
            self._report_when_terminated()
        self._hand_in_before_leaving_at_once()
        self.children.watch()
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
        if self.children.are_taken_over:
            return  # in a process that was forked before torch was there, and has its own
        from lockstep.audit.probe.hooking import hook_in
        from lockstep.audit.probe.probe import Probe

        self.probe = Probe(steps=self.options.steps, when_done=self._enough, keeps_groups=True)
        # The script may have changed its environment before it imported torch.
        self.probe.ledger.rank, self.probe.ledger.world_size = self.rank, self.world_size
        self.probe.when_training = self.children.note_training
        hook_in(self.probe)

    def _note_failure(self, error: BaseException, where: list[Place]) -> None:
        if self.probe is not None:
            self.probe.ledger.failure = describe_failure(error)
            self.probe.ledger.failed_at = time.time()
            self.probe.ledger.stack = where

    def _enough(self) -> None:
        """The steps that were asked for are in: the launcher can judge, the script goes on."""
        if self.probe is not None and self.folder is not None:
            self._file.write(self.probe.ledger)
            self._file.path.with_suffix(DONE).touch()

    def _hand_in(self, code: int) -> int:
        ledger = self._ledger()
        if ledger is None:
            return code
        ledger.exit_code = code
        if code == 0 and ledger.failure is None:
            ledger.stuck_in = None  # what a collective raised was caught
        if self.folder is not None:
            self._file.write(ledger)
            return code
        return self._report(ledger, code)

    def _ledger(self) -> Ledger | None:
        """None if torch was never imported, and nothing was started: there is nothing to tell."""
        if self.probe is not None:
            from lockstep.audit.session import finish

            ledger = finish(self.probe)
        elif "torch" in sys.modules or self.children.unwatched or self._spawned():
            ledger = Ledger(rank=self.rank, world_size=self.world_size)
            if "torch" in sys.modules:
                # Whatever brought it about, of what was not looked at nothing is known.
                ledger.facts.blind = "torch was imported in a way that the audit does not notice"
        else:
            return None
        ledger.facts.unwatched = self.children.unwatched
        return ledger

    def _spawned(self) -> list[Ledger]:
        """Under another launcher: what processes have left that this rank started."""
        if self.folder is not None:
            return []
        found = map(read_ledger, sorted(self.children.folder.glob("spawned*.json")))
        return [ledger for ledger in found if ledger is not None]

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
        ledger = self.probe.ledger
        ledger.facts.cpu_s = computed_in_session_s()
        if ledger.failure is None:
            ledger.stack = stack_of_main_thread()
        self._file.write(ledger)

    # -- another launcher ---------------------------------------------------------------------

    def _report(self, ledger: Ledger, code: int) -> int:
        from lockstep.audit.outcome import exit_code_of, report
        from lockstep.audit.session import exchange_records

        store = self.probe.store if self.probe is not None else None
        if store is None:
            ledger.facts.alone = True  # what the others saw cannot be asked for
        wait_s = 10.0 if code else 60.0
        own = [ledger, *self._spawned()]
        shutil.rmtree(self.children.folder, ignore_errors=True)
        ledgers = _read(exchange_records(own, store, self.rank, self.world_size, wait_s))
        if self.rank == 0:
            findings = report(self.options, ledgers, self.world_size)
        else:
            from lockstep.audit.judgement import judge

            findings = judge(ledgers, only=self.options.only, ignore=self.options.ignore)
        # A restart of the whole job would not make ranks any better watched.
        known = [finding for finding in findings if finding.code != BLIND]
        return code or exit_code_of(known, self.options.fail_on)

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
        self._file.write(ledger)
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
        _end_children_when_terminated(writing, wake)

        def wait() -> None:
            while os.read(reading, 1) != bytes([signal.SIGTERM]):
                pass
            if signal.getsignal(signal.SIGTERM) is not wake:
                return  # the program has a handler of its own, and may be saving
            if self.probe is not None:
                from lockstep.audit.outcome import report

                ledger = self.probe.ledger
                ledger.stack = stack_of_main_thread()
                with contextlib.suppress(Exception):
                    shutil.rmtree(self.children.folder, ignore_errors=True)
                    others: list[Ledger | None] = [None] * (self.world_size - 1)
                    report(self.options, [ledger, *others], self.world_size)
            os._exit(128 + signal.SIGTERM)

        threading.Thread(target=wait, name="lockstep.audit", daemon=True).start()


def _end_children_when_terminated(written: int, handler: Callable[[int, object], None]) -> None:
    """SIGTERM ends a forked child, unless the program says otherwise, from its first moment on.

    With `handler` a child would ignore the signal, and the byte that it writes to `written` would
    tell this rank of one of its own. So the signal waits while a process forks, until the child has
    no handler any more: Python forgets the signals that have arrived in a child before.
    """
    of_thread = threading.local()

    def block() -> None:
        of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, of_thread.mask)

    def forget() -> None:
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, written):
            signal.set_wakeup_fd(before)
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=forget)


def _read(everyone: Sequence[bytes | None]) -> list[Ledger | None]:
    """The ledgers that belong together; each rank gives its own, then those that it started."""
    lines = [[] if data is None else data.split(b"\n") for data in everyone]
    own = [Ledger.from_bytes(each[0]) if each else None for each in lines]
    return with_spawned(own, [Ledger.from_bytes(data) for each in lines for data in each[1:]])


def _has_threads() -> bool:
    """Are there threads that Python waits for before it ends?"""
    others = (t for t in threading.enumerate() if t is not threading.main_thread())
    return any(not thread.daemon for thread in others)
