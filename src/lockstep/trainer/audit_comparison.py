# SPDX-License-Identifier: Apache-2.0
"""Compares the audit's records of all workers: raises its errors, logs its warnings once."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lockstep.audit.finding import audit_error
from lockstep.audit.judgement import judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Ledger
    from lockstep.worker import Report, WorkerSpec

_log = logging.getLogger("lockstep")

_IGNORED_RULES: Final = ("LS115", "LS402", "LS404", "LS405", "LS406", "LS6")
"""Codes of rules that the trainer checks itself: non-finite gradients, unused parameters, and
whether workers communicate and live."""

_NOTICES: Final = ("LS116",)
"""Codes of notices that are logged."""

_OWN_WRAPPER_WARNING: Final = (
    "wrap_ddp=False: synchronising the gradients is your own wrapper's business; whether they and"
    " the replicas agree is watched"
)


class AuditComparison:
    """Compares the workers of one trainer, call after call.

    Args:
        spec: the spec of the workers.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._logged: set[str] = set()
        if spec.audit != "off" and spec.num_workers > 1 and not spec.options.wrap_ddp:
            _log.warning(_OWN_WRAPPER_WARNING)

    def judge(self, reports: Sequence[Report]) -> None:
        """Compare the workers' audit records of one call of `train`.

        Raises:
            AuditError: ranks are not replicas of one another, or a gradient is wrong. The steps
                were taken; a later call of the trainer goes on from them.
        """
        seen = [report.audit_ledger for report in reports]
        for ledger in seen:
            for error in ledger.facts.unseen[:1] if ledger is not None else ():
                self._log_once("unseen", f"the watch could not look at everything, e.g. {error}")
        if not any(_has_new_records(ledger) for ledger in seen):
            return
        found = (f for f in judge(seen) if not f.code.startswith(_IGNORED_RULES))
        findings = [self._adjust_severity(f) for f in found]
        for finding in findings:
            if finding.severity == "warning" or finding.code in _NOTICES:
                self._log_once(finding.code, str(audit_error([finding])))
        errors = [finding for finding in findings if finding.severity == "error"]
        if errors:
            raise audit_error(errors)

    def _adjust_severity(self, finding: Finding) -> Finding:
        if finding.code == "LS503" and not self._spec.options.add_dist_sampler:
            return replace(finding, severity="warning")  # the user asked for one loader per worker
        return finding

    def _log_once(self, what: str, text: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            _log.warning("%s", text)


def _has_new_records(ledger: Ledger | None) -> bool:
    """Whether the audit looked at a step in this call; in most short calls it does not."""
    return ledger is not None and ledger.facts.looked
