# SPDX-License-Identifier: Apache-2.0
"""Start N ranks of a script as torchrun would, watch over them, and report when they have ended.

No torch here: the launcher reads ledgers from files. Each rank is a session of its own, as under
torchrun, so that signals reach it once, through the launcher, and whatever it has started can be
ended with it. If the launcher is killed, a pipe closes and the ranks end.
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.audit.exit_codes import HUNG, USAGE
from lockstep.audit.facts import ProcessFacts
from lockstep.audit.ledger import Ledger, read_ledger
from lockstep.audit.options import (
    DEFAULT_RANKS,
    Options,
    file_of,
    problem_with,
)
from lockstep.audit.outcome import exit_code_of, report, write_nothing_found
from lockstep.audit.rank import DONE, DUMP, FOLDER, PIPE
from lockstep.audit.spawned import ASK
from lockstep.audit.together import with_spawned

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_POLL_S = 0.05
_DUMP_S = 2.0
_LATE_S = 30.0
"""A thread of the rank answers. It gets its turn late where the main thread computes and keeps the
interpreter, or where the machine is overloaded: who has not answered yet is not said to hang."""
_TERMINATE_S = 30.0
_STALL_S = "LOCKSTEP_AUDIT_STALL_S"
_IDLE = 0.02
"""Of the time, a rank that does nothing may compute: as much as to write down where it stands."""
_INSISTS = 3
_NO_ROOM = "what a rank saw could not be written: is the disk with TMPDIR full?"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class _Process:
    rank: int
    popen: subprocess.Popen[bytes]
    pipe: int
    ended_by_us: bool = False

    def ask(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.pipe, DUMP)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)


@dataclass(frozen=True)
class _Question:
    """Ranks, and the files of processes they started, that were asked where they stand."""

    asked_at: float  # seconds since 1970, as the times of files
    ranks: list[_Process]
    spawned: list[Path]


def launch(options: Options) -> int:
    """Run `options.script` on its ranks. Returns the exit code."""
    problem = problem_with(options)
    if problem is not None:
        write_nothing_found(options.files, options.nproc or DEFAULT_RANKS)
        print(f"lockstep audit: {problem}", file=sys.stderr)
        return USAGE
    try:
        source = _parsed(file_of(options))
    except (SyntaxError, ValueError) as error:
        # Once, as Python shows it, and not by every rank.
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        write_nothing_found(options.files, options.nproc or DEFAULT_RANKS)
        return 1
    nproc = options.nproc or (1 if _starts_its_own(source) else DEFAULT_RANKS)
    with tempfile.TemporaryDirectory(prefix="lockstep-audit-") as folder:
        return _Run(options, nproc, folder).run()


def _parsed(script: Path | None) -> ast.Module:
    return ast.parse(b"" if script is None else script.read_bytes(), filename=str(script))


def _starts_its_own(source: ast.Module) -> bool:
    """Does the script start ranks: by ``spawn(...)``, or by ``Process(...)``, each told its own?"""
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.Call) and (node.args or node.keywords):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            calls.setdefault(name, []).append(node)
    told = any(
        len(call.args) > 2 or any(given.arg == "rank" for given in call.keywords)
        for call in calls.get("init_process_group", ())
    )
    return not calls.keys().isdisjoint(("spawn", "start_processes")) or (
        told and "Process" in calls
    )


def _after(number: int, left: int) -> str:
    """What a signal to the launcher did, and how to insist. A rank may wait in C++, deaf to it."""
    name = signal.Signals(number).name
    if not left:
        return f"lockstep audit: {name}: the ranks are killed\n"
    insist = "once more kills them" if left == 1 else "the third one kills them"
    return f"lockstep audit: {name} passed on to the ranks, which may save or clean up; {insist}\n"


class _Run:
    """One run, from the first process to the report."""

    def __init__(self, options: Options, nproc: int, folder: str) -> None:
        self.options = options
        self.nproc = nproc
        self.folder = Path(folder)
        self.processes: list[_Process] = []
        self.interrupted = 0
        self.reported = False
        self._standing: list[Any] = []
        self._computed = 0.0
        self._stands_since: float | None = None
        self._hangs = False
        self._asked_at = time.monotonic()
        self._question: _Question | None = None  # while not all have answered

    def run(self) -> int:
        """Start, wait, judge."""
        # Under `nohup` and in a shell's background ranks ignore a signal as this process does.
        heeded = [each for each in _FORWARDED if signal.getsignal(each) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._forward) for number in heeded}
        try:
            with _held_port() as port:
                self._start(str(port))
                self._wait()
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._conclude()

    def _start(self, port: str) -> None:
        for rank in range(self.nproc):
            reading, writing = os.pipe()
            # As torchrun: what a rank printed is there when it is killed. And a file that lies in
            # the working directory is not taken for a module of Python's or ours.
            command = [sys.executable, "-u", "-P", "-m", "lockstep.audit", *self._arguments()]
            popen = subprocess.Popen(
                command,
                env=self._environment(rank, port, reading),
                pass_fds=[reading],
                start_new_session=True,
            )
            os.close(reading)
            self.processes.append(_Process(rank, popen, writing))

    def _arguments(self) -> list[str]:
        steps = [] if self.options.steps is None else ["--steps", str(self.options.steps)]
        module = ["-m"] if self.options.is_module else []
        return [*steps, *module, self.options.script, *self.options.arguments]

    def _environment(self, rank: int, port: str, pipe: int) -> dict[str, str]:
        environment = {
            **os.environ,
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(self.nproc)),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": f"lockstep-audit-{os.getpid()}",
            FOLDER: str(self.folder),
            PIPE: str(pipe),
        }
        if self.nproc > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        return environment

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Ask where everybody stands, then pass the signal on; insist at the third."""
        self.interrupted += 1
        if self.interrupted == 1:
            self._ask_all()
        for process in self.processes:
            if process.popen.poll() is None:
                process.send(signal.SIGKILL if self.interrupted >= _INSISTS else number)
        if self.interrupted <= _INSISTS:
            # Last: who reads it may have gone. Not `print`, which a signal may have interrupted.
            with contextlib.suppress(OSError):
                os.write(2, _after(number, _INSISTS - self.interrupted).encode())

    def _ask_all(self) -> None:
        """Everybody's ledger, within a short time; who cannot answer has none."""
        question = self._ask()
        deadline = time.monotonic() + _DUMP_S
        while time.monotonic() < deadline and not self._is_answered(question):
            time.sleep(_POLL_S)

    def _ask(self) -> _Question:
        living = [p for p in self.processes if p.popen.poll() is None]
        now = time.time()
        for process in living:
            process.ask()
        spawned = [p.with_suffix(".json") for p in self.folder.glob(f"spawned*{ASK}") if _asked(p)]
        return _Question(now, living, spawned)

    def _is_answered(self, question: _Question) -> bool:
        left = [p for p in question.ranks if p.popen.poll() is None]
        ledgers = [self.folder / f"rank{process.rank}.json" for process in left]
        return all(_is_newer(path, question.asked_at) for path in (*ledgers, *question.spawned))

    def _wait(self) -> None:
        while True:
            codes = [p.popen.poll() for p in self.processes]
            if any(codes) or None not in codes:
                return
            if self.options.steps is not None and not self.reported:
                self._report_early()
            self._look_for_a_stall()
            if self._hangs:
                return
            time.sleep(_POLL_S)

    def _report_early(self) -> None:
        """With --steps, as soon as all ranks have them."""
        # What ranks have left that are not watched any more.
        if len(list(self.folder.glob(f"rank*{DONE}"))) == self.nproc:
            report(self.options, self._ledgers(), self.nproc)
            self.reported = True

    def _look_for_a_stall(self) -> None:
        """Say, once, where the ranks stand when none of them moves; then give them up."""
        every_s = float(os.environ.get(_STALL_S, "60"))
        since_s = time.monotonic() - self._asked_at
        if self._question is None:
            if since_s >= every_s:
                self._asked_at, self._question = time.monotonic(), self._ask()
            return
        if since_s < _LATE_S and not self._is_answered(self._question):
            return
        self._question = None
        ledgers = [ledger for ledger in self._ledgers() if ledger is not None]
        standing = [
            (led.calls_made, [t.count for t in led.tracks], led.stack[:1]) for led in ledgers
        ]
        waits = any(led.stuck_in is not None for led in ledgers)
        computes = [0.0 if led.stuck_in else led.facts.cpu_s for led in ledgers]
        stands = waits and standing == self._standing and len(ledgers) >= self.nproc
        # Long at one line, as one rank evaluates what the others wait for: no hang. The sum is less
        # than before where a process has ended that nobody waited for.
        stands &= abs(sum(computes) - self._computed) <= _IDLE * every_s
        self._standing, self._computed = standing, sum(computes)
        limit_s = self.options.hang_timeout
        if not stands:
            self._stands_since = None
        elif self._stands_since is None:
            self._stands_since = time.monotonic()
            lines = [f"  rank {led.rank} {led.standing}" for led in ledgers]
            end = f"they are ended in {limit_s:g} s (--hang-timeout)" if limit_s else ""
            _say(f"nothing has moved for {every_s:.0f} s:", *lines, *[f"  {end}"] * bool(end))
        elif limit_s and time.monotonic() - self._stands_since >= limit_s:
            _say("the ranks hang, and are ended")
            self._hangs = True

    def _end_all(self) -> None:
        """As torchrun: when one rank has failed the others are terminated, then killed."""
        living = [p for p in self.processes if p.popen.poll() is None]
        if living:
            self._ask_all()
        for process in living:
            if process.popen.poll() is None:
                process.ended_by_us = True
                process.send(signal.SIGTERM)
        deadline = time.monotonic() + _TERMINATE_S
        for process in living:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            if process.popen.poll() != 0:
                # Whatever the rank started is in its session. A rank that ended well may have left
                # something there on purpose, as without us.
                process.send(signal.SIGKILL)
            process.popen.wait()
            os.close(process.pipe)

    def _conclude(self) -> int:
        ledgers = self._ledgers()
        code = self._script_code()
        findings = report(self.options, ledgers, self.nproc, quiet=self.reported and code == 0)
        found = exit_code_of(findings, self.options.fail_on)
        return code or found or (HUNG if self._hangs else 0)

    def _script_code(self) -> int:
        """Of the rank that failed first, by its own clock; a signal as a shell writes it."""
        codes = {
            p.rank: p.popen.returncode
            for p in self.processes
            if p.popen.returncode != 0 and not p.ended_by_us
        }
        if not codes:
            return 0
        times = {
            ledger.rank: ledger.failed_at
            for ledger in self._ledgers()
            if ledger is not None and ledger.failed_at is not None
        }
        first = min(codes, key=lambda rank: (times.get(rank, float("-inf")), rank))
        return codes[first] if codes[first] > 0 else 128 - codes[first]

    def _ledgers(self) -> list[Ledger | None]:
        read = map(read_ledger, sorted(self.folder.glob("spawned*.json")))
        own = [
            read_ledger(self.folder / f"rank{rank}.json") or self._without_ledger(rank)
            for rank in range(self.nproc)
        ]
        for rank, ledger in enumerate(own):
            ended = self.processes[rank]
            code = ended.popen.returncode
            if ledger is not None and ledger.exit_code is None and not ended.ended_by_us:
                ledger.exit_code = code if code is not None and code > 0 else None
        return with_spawned(own, [ledger for ledger in read if ledger is not None])

    def _without_ledger(self, rank: int) -> Ledger | None:
        """The record of a rank that ended before it imported torch, or could not write its own.

        It left by itself, or was ended here because another rank had failed: then that rank's
        failure is the news, and not this one's silence.
        """
        code = self.processes[rank].popen.returncode
        if self.processes[rank].ended_by_us:
            failed = any(p.popen.returncode and not p.ended_by_us for p in self.processes)
            return Ledger(rank=rank, world_size=self.nproc) if failed else None
        if code is None:
            return None
        died = signal.Signals(-code).name if code < 0 else None
        tried = (self.folder / f"rank{rank}.json").exists()
        return Ledger(
            rank=rank,
            world_size=self.nproc,
            exit_code=code if code >= 0 else 128 - code,
            facts=ProcessFacts(died=died, blind=_NO_ROOM if tried else None),
        )


def _asked(pipe: Path) -> bool:
    """Ask a process that the script started for its ledger; False if nobody is there to hear."""
    try:
        writing = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.write(writing, DUMP)
    os.close(writing)
    return True


def _is_newer(path: Path, than: float) -> bool:
    return path.exists() and path.stat().st_mtime >= than - 0.01


def _say(first: str, *further: str) -> None:
    print(f"lockstep audit: {first}", *further, sep="\n", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _held_port() -> Iterator[int]:
    """A port that nobody else is given until rank 0 listens on it, seconds later.

    It stays bound, and not listened on: rank 0 may bind it as well, since both allow its reuse, and
    the system hands it out to no other program and no connection. So on Linux; where two may not be
    bound side by side it is let go at once.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = int(held.getsockname()[1])
        if sys.platform != "linux":
            held.close()
        yield port
