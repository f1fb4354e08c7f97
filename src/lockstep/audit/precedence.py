# SPDX-License-Identifier: Apache-2.0
"""Which findings are consequences of others, and are not reported beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lockstep.audit.finding import Finding

_FOLLOWING: Final = frozenset(
    {"LS101", "LS102", "LS107", "LS116", "LS203", "LS204", "LS205", "LS206", "LS207", "LS208"}
    | {"LS209", "LS210", "LS211", "LS302", "LS303", "LS304", "LS306", "LS307", "LS309", "LS311"}
    | {"LS104", "LS507", "LS508"}
)
"""What is seen of gradients, replicas and inputs where ranks do not train one model any more."""

EXPLAINS: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("LS101", "LS102", "LS104", "LS105", "LS106", "LS107"), _FOLLOWING),
    **dict.fromkeys(("LS302", "LS303", "LS304", "LS307", "LS308", "LS314"), _FOLLOWING),
    "LS503": frozenset({"LS507", "LS508"}),
}
"""By code, the codes of its consequences, of the same optimizer."""


def without_consequences(findings: Iterable[Finding]) -> list[Finding]:
    """`findings`, in their order, but for those that an earlier one explains or says already.

    A notice explains nothing.
    """
    kept: list[Finding] = []
    for finding in findings:
        if not any(_explains(earlier, finding) for earlier in kept):
            kept.append(finding)
    return kept


def _explains(earlier: Finding, finding: Finding) -> bool:
    if earlier.severity == "notice" or earlier.optimizer == "*":
        return False
    of_all = not earlier.optimizer or finding.optimizer == "*"
    if earlier.optimizer != finding.optimizer and not of_all:
        return False
    is_told = bool(finding.optimizer) and earlier.code == finding.code
    return is_told or finding.code in EXPLAINS.get(earlier.code, ())
