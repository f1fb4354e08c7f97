# SPDX-License-Identifier: Apache-2.0
"""The findings in SARIF 2.1.0, the format in which code hosts and editors read them.

Source: Static Analysis Results Interchange Format 2.1.0 Plus Errata 01 (OASIS, 2023).
"""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.audit.exit_codes import BLIND
from lockstep.audit.explain import page_of
from lockstep.audit.finding import Place
from lockstep.audit.report.repository_paths import Repository

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.finding import Finding

_SCHEMA: Final = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_LEVELS: Final = {"error": "error", "warning": "warning", "notice": "note"}
_ROOT: Final = "SRCROOT"


def sarif(findings: Sequence[Finding], summary: dict[str, Any]) -> dict[str, Any]:
    """A log with one run.

    Args:
        findings: what is reported.
        summary: as the JSON file has it.
    """
    repository = Repository.around(Path.cwd())
    codes = list(dict.fromkeys(finding.code for finding in findings))
    driver = {
        "name": "lockstep audit",
        "version": summary["lockstep"] or "unknown",
        "rules": [_rule(next(f for f in findings if f.code == code)) for code in codes],
    }
    # Hosts show no finding without a place: the script stands for a rank that left none.
    script = next((word for word in summary["command"][:1] if Path(word).is_file()), None)
    instead = None if script is None else Place(script, 1, "<module>", "")
    has_run = summary["finished"] is not None
    invocation: dict[str, Any] = {"executionSuccessful": has_run and not summary["failed"]}
    if has_run:
        invocation["commandLine"] = shlex.join(["lockstep", "audit", *summary["command"]])
        invocation["endTimeUtc"] = summary["finished"].replace("+00:00", "Z")
    # Of the audit itself, and not of the program: hosts show the result, and tools read this.
    notifications = [
        *(_notification(f.message, "error") for f in findings if f.code == BLIND),
        *(_notification(error, "warning") for error in summary["unseen"]),
    ]
    if notifications:
        invocation["toolExecutionNotifications"] = notifications
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "originalUriBaseIds": {_ROOT: {"uri": f"{repository.root.as_uri().rstrip('/')}/"}},
        "results": [_result(f, codes.index(f.code), repository, instead) for f in findings],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _notification(text: str, level: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": text}}


def _rule(finding: Finding) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "id": finding.code,
        "name": finding.code,
        "shortDescription": {"text": finding.name},
        "defaultConfiguration": {"level": _LEVELS[finding.severity]},
    }
    page = page_of(finding.code)
    return rule if page is None else rule | {"help": {"text": page, "markdown": page}}


def _result(
    finding: Finding, number: int, repository: Repository, instead: Place | None
) -> dict[str, Any]:
    first = repository.shown_place(finding) or next(iter(finding.where), instead)
    others = [place for place in finding.where if place is not first]
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": number,
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.message}\nFix: {finding.fix}"},
        "partialFingerprints": {"lockstepFinding/v1": _fingerprint(finding, first, repository)},
        "properties": {
            "rank": finding.rank,
            "step": finding.step,
            "parameters": finding.parameters,
            "optimizer": finding.optimizer,
            "evidence": finding.evidence,
        },
    }
    if first is not None:
        result["locations"] = [_location(first, repository)]
    if others:
        result["relatedLocations"] = [_location(place, repository) for place in others]
    return result


def _location(place: Place, repository: Repository) -> dict[str, Any]:
    artifact = {"uri": repository.uri(place.file)}
    if repository.relative(place.file) is not None:
        artifact["uriBaseId"] = _ROOT
    region: dict[str, Any] = {"startLine": max(1, place.line)}
    if place.text:
        region["snippet"] = {"text": place.text}
    return {
        "physicalLocation": {"artifactLocation": artifact, "region": region},
        "logicalLocations": [{"name": place.function, "kind": "function"}],
        "message": {"text": f"{place.function}: {place.text}".rstrip(": ")},
    }


def _fingerprint(finding: Finding, first: Place | None, repository: Repository) -> str:
    """Tells a host that it knows the finding, although lines have moved or numbers have changed."""
    parts = [finding.code, finding.optimizer, *finding.parameters[:1]]
    if first is not None:
        parts += [repository.uri(first.file), first.function, first.text]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
