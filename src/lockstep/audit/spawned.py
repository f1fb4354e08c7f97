# SPDX-License-Identifier: Apache-2.0
"""Processes that a script starts itself. Imports no torch.

What ``multiprocessing`` starts, and so ``torch.multiprocessing.spawn``, runs under a probe of its
own and leaves a ledger beside those of the ranks. Whatever else trains is named: a process that was
forked has its parent's hooks, and leaves a note with its first backward; of one that begins anew,
as ``subprocess.Popen`` starts them, its parent knows the line.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from lockstep.audit.facts import ProcessFacts, Unwatched
from lockstep.audit.importing import when_imported
from lockstep.audit.interpreters import starts_python
from lockstep.audit.ledger import Ledger, LedgerFile
from lockstep.audit.probe.frames import stack_of_main_thread, users_lines
from lockstep.audit.script import describe_failure, lines_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from lockstep.audit.probe.probe import Probe

ASK: Final = ".ask"
"""How the named pipe ends by which a process is asked for its ledger."""

_LOADERS: Final = "torch.utils.data._utils.worker"
_TORCHS_SPAWN: Final = "torch.multiprocessing.spawn"
_UNWATCHED: Final = 4
"""So many lines that started other processes are kept."""

_BEGINS_ANEW: Final = ("system", "posix_spawn", "posix_spawnp")
_REPLACES: Final = ("execv", "execve", "execvp", "execvpe")
_FORKED: Final = "a process that the script forked trained without a probe of its own"
_LOST: Final = "a process that the script started trained and ended before it wrote its record"
_REPLACED: Final = "a rank replaced itself by another program"


class Children:
    """What one process starts.

    Args:
        folder: where ledgers of those that are watched go; made when the first is started.
        rank: of the launcher's process that all of them descend from.
        steps: watch so many optimizer steps, or None for all.
        probe: this process's own, once there is one.
    """

    def __init__(
        self, folder: Path, rank: int, steps: int | None, probe: Callable[[], Probe | None]
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.steps = steps
        self.probe = probe
        self.unwatched: list[Unwatched] = []
        self.are_taken_over = False
        self._started = 0
        self._pid = os.getpid()

    def watch(self) -> None:
        """From now on; modules of Python's that the script has not imported stay unimported."""
        when_imported("multiprocessing.process", self._watch_multiprocessing)
        when_imported("subprocess", self._watch_subprocess)
        for name in (*_BEGINS_ANEW, *_REPLACES):
            if hasattr(os, name):
                setattr(os, name, self._noted(getattr(os, name), f"os.{name}"))

    def _watch_multiprocessing(self) -> None:
        process = sys.modules["multiprocessing.process"].BaseProcess
        start = process.start

        @functools.wraps(start)
        def watched(self_: BaseProcess) -> Any:
            if getattr(getattr(self_, "_target", None), "__module__", None) == _LOADERS:
                return start(self_)  # a data loader's, which trains nothing
            self.folder.mkdir(mode=0o700, exist_ok=True)
            held = vars(self_)
            own = {"run": held["run"]} if "run" in held else {}
            held["run"] = Watched(self_, self, self._started, own.get("run"))
            self._started += 1
            try:
                return start(self_)
            finally:
                del held["run"]
                held.update(own)

        process.start = watched

    def _watch_subprocess(self) -> None:
        popen = sys.modules["subprocess"].Popen
        popen.__init__ = self._noted(popen.__init__, "subprocess.Popen", place=1)

    def _noted(self, start: Callable[..., Any], how: str, place: int = 0) -> Callable[..., Any]:
        """As `start`, of a program whose command is its argument at `place`."""

        @functools.wraps(start)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place:
                command = _listed(args[place])
                args = (*args[:place], command, *args[place + 1 :])
            else:
                command = _listed(kwargs.get("args"))
                kwargs |= {"args": command} if "args" in kwargs else {}
            with contextlib.suppress(Exception):
                if starts_python(command):
                    self._note(how)
            return start(*args, **kwargs)

        return noted

    def _note(self, how: str) -> None:
        where = users_lines()
        if how.rpartition(".")[2] in _REPLACES:
            self.leave_note(_REPLACED)
        elif len(self.unwatched) < _UNWATCHED:
            self.unwatched.append(Unwatched(how, where))

    def note_training(self) -> None:
        """A backward runs. In the process that this was made for it is its own probe that sees."""
        if os.getpid() != self._pid:
            self.leave_note(_FORKED)

    def leave_note(self, why: str) -> None:
        """Where the ledger would be: what trained here is not known, or not yet."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        noted = Ledger(facts=ProcessFacts(blind=why, blind_at=users_lines()))
        LedgerFile(self.file()).write(noted)

    def file(self) -> Path:
        """The ledger of this process, as one that was started."""
        return self.folder / f"spawned{self.rank:06}-{os.getpid()}.json"


def _listed(command: Any) -> Any:
    """An iterator as a list: it can be read once, and whom it is given reads it, too."""
    return list(command) if isinstance(command, Iterator) else command


class Watched:
    """Stands for ``Process.run`` in the process that was started, which a pickle may have reached.

    Args:
        process: whose ``run`` it is.
        children: of the process that starts it.
        index: how many that one had started before.
        run: what the object itself had in the place of its class's.
    """

    def __init__(
        self,
        process: BaseProcess,
        children: Children,
        index: int,
        run: Callable[[], Any] | None,
    ) -> None:
        self.process = process
        self.index = index
        self.run = run
        self._given = children.folder, children.rank, children.steps
        self._inherited: Children | None = children

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_inherited": None}

    def __call__(self) -> Any:
        member = _Member(self.index, is_torchs=self._is_torchs())
        if self._inherited is not None:
            children = self._inherited  # forked: its hooks are in place, and serve this process
            member.take_over(children)
        else:
            children = Children(*self._given, member.current)
            children.watch()
        member.children = children
        when_imported("torch", member.begin)
        try:
            return type(self.process).run(self.process) if self.run is None else self.run()
        except BaseException as error:
            member.note_failure(error)
            raise
        finally:
            member.end()

    def _is_torchs(self) -> bool:
        target = getattr(self.process, "_target", None)
        return getattr(target, "__module__", None) == _TORCHS_SPAWN


class _Member:
    """The probe and the ledger of a process that the script started."""

    children: Children

    def __init__(self, index: int, *, is_torchs: bool) -> None:
        self._index = index
        self._is_torchs = is_torchs
        self._probe: Probe | None = None
        self._pid = os.getpid()
        self._failure: BaseException | None = None

    def current(self) -> Probe | None:
        return self._probe

    def take_over(self, children: Children) -> None:
        """After a fork: what the parent has seen, and started, is the parent's."""
        probe = children.probe()
        if probe is not None:
            probe.when_training = None
            probe.pause()
        children.unwatched.clear()
        children.are_taken_over = True
        children.probe = self.current

    def begin(self) -> None:
        """Torch is there."""
        if self._probe is not None or os.getpid() != self._pid:
            return
        from lockstep.audit.probe.hooking import hook_in
        from lockstep.audit.probe.probe import Probe, default_group

        self._probe = Probe(steps=self.children.steps, keeps_groups=True)
        self._probe.inherited = default_group()
        self._probe.ledger.rank, self._probe.ledger.world_size = self._index, 1
        # Replaced at the end, if there is one: a process that is killed leaves the note.
        self._probe.when_training = lambda: self.children.leave_note(_LOST)
        hook_in(self._probe)
        self._file = LedgerFile(self.children.file())
        threading.Thread(target=self._answer, name="lockstep.audit", daemon=True).start()

    def _answer(self) -> None:
        """Write the ledger whenever the launcher asks."""
        pipe = self._file.path.with_suffix(ASK)
        with contextlib.suppress(OSError):
            os.mkfifo(pipe)
            # For writing, too: else it would be at its end whenever nobody else writes.
            asked = os.open(pipe, os.O_RDWR)
            while os.read(asked, 1):
                self._write_where_it_stands()

    def _write_where_it_stands(self) -> None:
        if self._probe is not None and self._failure is None and self._probe.is_on:
            self._probe.ledger.facts.cpu_s = time.process_time()
            self._probe.ledger.stack = stack_of_main_thread()
            self._file.write(self._probe.ledger)

    def note_failure(self, error: BaseException) -> None:
        """Torch's ``spawn`` leaves with a code, from inside of what was raised."""
        if isinstance(error, SystemExit):
            if error.code in (None, 0):
                return
            error = error.__context__ or error
        self._failure = error

    def end(self) -> None:
        """Write the ledger, if there is anything in it that others could be compared with."""
        if self._probe is None or os.getpid() != self._pid:
            return
        from lockstep.audit.session import finish

        ledger = finish(self._probe)
        error = self._failure
        if error is not None:
            ledger.failure = describe_failure(error)
            ledger.failed_at = time.time()
            ledger.stack = lines_of(error)
        elif not self._is_torchs:  # which lets an interrupt pass in silence
            ledger.stuck_in = None
        ledger.exit_code = 0 if error is None else 1
        ledger.facts.unwatched = self.children.unwatched
        with contextlib.suppress(OSError):
            self._file.path.with_suffix(ASK).unlink()
        seen = ledger.tracks or ledger.started_group or ledger.facts.backwards
        if seen or error is not None:
            with contextlib.suppress(OSError):  # the launcher may have gone
                self._file.write(ledger)
