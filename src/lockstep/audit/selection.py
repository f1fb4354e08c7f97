# SPDX-License-Identifier: Apache-2.0
"""Which rules were asked for, and what the others found: a report says what it leaves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.audit.exit_codes import BLIND

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from lockstep.audit.finding import Finding


@dataclass(frozen=True)
class Selection:
    """Codes, or beginnings (``LS5``): `only` these (all if empty), without those of `ignore`.

    LS406 is always selected: if the audit could not look, no other rule has an answer.
    """

    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def takes(self, code: str) -> bool:
        """Is it one that was asked for?"""
        is_asked = not self.only or code.startswith(self.only)
        return code == BLIND or (is_asked and not code.startswith(self.ignore))

    def split(self, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """What was asked for, and what is left out."""
        taken: list[Finding] = []
        left_out: list[Finding] = []
        for finding in findings:
            (taken if self.takes(finding.code) else left_out).append(finding)
        return taken, left_out

    def rules(self, codes: Collection[str]) -> str:
        """``36 rules``, or how many of them and by which option."""
        asked = sum(map(self.takes, codes))
        if asked == len(codes):
            return f"{asked} rules"
        return f"{asked} of {len(codes)} rules ({self})"

    def __str__(self) -> str:
        options = {"--only": self.only, "--ignore": self.ignore}
        return " ".join(f"{name} {','.join(codes)}" for name, codes in options.items() if codes)


def left_out_in_words(findings: Iterable[Finding]) -> str:
    """``left out: 2 errors (LS101, LS301)``, by severity; empty if nothing was."""
    grave: dict[str, list[str]] = {}
    for finding in findings:
        grave.setdefault(finding.severity, []).append(finding.code)
    kinds = [
        f"{len(codes)} {severity}{'s' * (len(codes) != 1)} ({', '.join(sorted(set(codes)))})"
        for severity, codes in grave.items()
    ]
    return f"left out: {', '.join(kinds)}" if kinds else ""
