# SPDX-License-Identifier: Apache-2.0
"""The findings as workflow commands, which GitHub shows at the lines of a pull request.

Source: "Workflow commands for GitHub Actions" in GitHub's documentation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.audit.report.repository_paths import Repository

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.finding import Finding


def github_annotations(findings: Sequence[Finding]) -> str:
    """One command a line, the gravest first."""
    repository = Repository.around(Path.cwd())
    by_gravity = sorted(findings, key=lambda f: ("error", "warning", "notice").index(f.severity))
    return "".join(f"{_command(finding, repository)}\n" for finding in by_gravity)


def _command(finding: Finding, repository: Repository) -> str:
    properties = {"title": f"{finding.code}: {finding.name}"}
    place = repository.shown_place(finding)
    if place is not None:
        file = repository.relative(place.file) or place.file
        properties = {"file": file, "line": str(max(1, place.line)), **properties}
    given = ",".join(f"{name}={_in_property(value)}" for name, value in properties.items())
    return f"::{finding.severity} {given}::{_in_message(finding.message + chr(10) + finding.fix)}"


def _in_message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _in_property(text: str) -> str:
    return _in_message(text).replace(":", "%3A").replace(",", "%2C")
