# SPDX-License-Identifier: Apache-2.0
"""From ledgers to what the user sees: the report, the files, the exit code."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep._version import __version__
from lockstep.audit.exit_codes import BLIND, FOUND, NOT_WATCHED
from lockstep.audit.finding import is_at_least
from lockstep.audit.judgement import judge
from lockstep.audit.report.junit import junit
from lockstep.audit.report.sarif import sarif
from lockstep.audit.report.terminal import render
from lockstep.audit.selection import Selection
from lockstep.audit.world import World
from lockstep.installed_versions import version_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.audit.finding import Finding
    from lockstep.audit.ledger import Ledger
    from lockstep.audit.options import FailOn, Options


def report(
    options: Options,
    ledgers: Sequence[Ledger | None],
    world_size: int,
    *,
    quiet: bool = False,
) -> list[Finding]:
    """Judge, print to standard error, and write the files that were asked for.

    Returns:
        The findings.
    """
    asked = Selection(options.only, options.ignore)
    findings, left_out = asked.split(judge(ledgers))
    world = World(ledgers)
    summary = summarise(findings, world, world_size) | {
        "command": [*["-m"] * options.is_module, options.script, *options.arguments],
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "only": list(options.only),
        "ignore": list(options.ignore),
        "left_out": dict(sorted(Counter(finding.code for finding in left_out).items())),
    }
    write_files(options.files, findings, summary, options.fail_on)
    if options.html is not None:
        from lockstep.audit.report.page import page

        text = page(findings, world, summary, left_out)
        Path(options.html).write_text(text, encoding="utf-8")
    if not quiet:
        print(render(findings, world, asked, left_out), file=sys.stderr, flush=True)
        if options.github:
            from lockstep.audit.report.github_annotations import github_annotations

            # A command begins a line, and the script may have left one open.
            print(f"\n{github_annotations(findings)}", end="", flush=True)
    return findings


def summarise(findings: Sequence[Finding], world: World, world_size: int) -> dict[str, Any]:
    """What the JSON file holds."""
    return {
        "findings": [finding.as_dict() for finding in findings],
        "steps": world.steps,
        "world_size": max(world_size, world.size),
        "failed": world.has_failed(),
        "unseen": world.unseen,
        "failed_rules": sorted({code for facts in world.facts for code in facts.failed_rules}),
        "lockstep": __version__,
        "torch": version_of("torch"),
        "command": [],
        "finished": None,
        "only": [],
        "ignore": [],
        "left_out": {},
    }


def write_files(
    files: Mapping[str, str],
    findings: Sequence[Finding],
    summary: dict[str, Any],
    fail_on: FailOn,
) -> None:
    """Write what programs read, each file all or nothing.

    Args:
        files: by format, see `Options.files`.
        findings: what is reported.
        summary: as the JSON file has it.
        fail_on: which findings let a rule fail.
    """
    for name, path in files.items():
        if name == "junit":
            text = junit(findings, summary, fail_on)
        elif name == "sarif":
            text = _as_json(sarif(findings, summary))
        else:
            text = _as_json(summary)
        partial = Path(path + ".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)


def write_nothing_found(files: Mapping[str, str], world_size: int) -> None:
    """The files of a run that did not come about: a reader must not take older ones for them.

    Args:
        files: as of `write_files`.
        world_size: how many ranks there would have been.
    """
    write_files(files, [], summarise([], World([None]), world_size), "error")


def exit_code_of(findings: Sequence[Finding], fail_on: FailOn) -> int:
    """65 if something is as grave as `fail_on`; else 66 if ranks were not watched; else 0."""
    if fail_on == "never":
        return 0
    if any(f.code != BLIND and is_at_least(f.severity, fail_on) for f in findings):
        return FOUND
    return NOT_WATCHED if any(f.code == BLIND for f in findings) else 0


def _as_json(value: dict[str, Any]) -> str:
    """NaN and infinities as null, which JSON has no word for."""
    plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(plain, indent=2)
