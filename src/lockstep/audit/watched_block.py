# SPDX-License-Identifier: Apache-2.0
"""`watching`: the audit around a part of a program, which ends however that part ends.

Callbacks of other trainers (`lockstep.integrations`) are this context manager, entered and left by
the trainer's hooks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Self, get_args

from lockstep.audit.finding import audit_error, is_at_least
from lockstep.audit.judgement import judge
from lockstep.audit.options import FailOn
from lockstep.audit.report.terminal import render
from lockstep.audit.selection import Selection
from lockstep.audit.session import end_watch, leave_exchange, ledgers_of_all, start
from lockstep.audit.world import World
from lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from lockstep.audit.finding import Finding

_log = logging.getLogger("lockstep")

_MODES: Final = ("watch", "full")


class watching:
    """Watch this process within ``with``. On every rank, and before the optimizers are made.

    At the end of the block rank 0 logs the report to the logger "lockstep": a warning if something
    was found, else an info. Where the block raises, nothing is compared: the exception passes, the
    watch is over, and no rank waits for another. It may be entered again when it was left.

    Args:
        steps: look at so many optimizer steps only.
        mode: ``watch`` looks at few steps in detail, ``full`` at many.
        only: report these codes, or beginnings of codes (``LS5``), only; all if empty.
        ignore: leave these codes, or beginnings of codes, out.
        fail_on: ``error`` or ``warning``: raise at the end if something as grave was found.

    Attributes:
        findings: what was found when it was last left, the same on every rank.

    Gradient:
        None: it reads.

    Collective:
        None while it watches. At the end every rank of the default process group, each once:
        blocks until all ledgers are there, or a minute for each rank that does not come.

    Raises:
        ConfigurationError: a `mode` or a `fail_on` that does not exist.
        WrongUseError: on entry: the process is watched already.
        AuditError: at the end, on every rank: see `fail_on`.
    """

    def __init__(
        self,
        *,
        steps: int | None = None,
        mode: str = "watch",
        only: Collection[str] = (),
        ignore: Collection[str] = (),
        fail_on: FailOn = "never",
    ) -> None:
        # Refused now, and not when training has ended.
        for name, given, known in (("mode", mode, _MODES), ("fail_on", fail_on, get_args(FailOn))):
            if given not in known:
                raise ConfigurationError(
                    f"{name}={given!r} does not exist", expected=f"one of {', '.join(known)}"
                )
        self.findings: list[Finding] = []
        self._mode, self._steps = mode, steps
        self._asked = Selection(tuple(only), tuple(ignore))
        self._fail_on = fail_on
        self._is_entered = False

    def __enter__(self) -> Self:
        start(mode=self._mode, steps=self._steps)
        self._is_entered = True
        self.findings = []
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_entered:
            return  # a trainer may tell its callbacks of an error that came before, or twice
        self._is_entered = False
        ledger, store = end_watch()
        if error is not None:
            leave_exchange(store, ledger.rank, ledger.world_size)
            return
        ledgers = ledgers_of_all(ledger, store)
        self.findings, left_out = self._asked.split(judge(ledgers))
        if ledger.rank == 0:
            level = logging.WARNING if self.findings else logging.INFO
            _log.log(level, "%s", render(self.findings, World(ledgers), self._asked, left_out))
        if self._fail_on != "never":
            grave = [f for f in self.findings if is_at_least(f.severity, self._fail_on)]
            if grave:
                raise audit_error(grave)
