# SPDX-License-Identifier: Apache-2.0
"""The audit as a suite of tests in JUnit's XML, which every CI server shows: a test for each rule.

A rule fails where it has findings as grave as ``--fail-on`` says; milder ones are in its output.
Where nothing could be compared no rule has passed: all are skipped. The first test is the script
itself, with what the audit could not look at; a rule that raised an error of its own is one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from lockstep.audit.exit_codes import BLIND
from lockstep.audit.finding import is_at_least
from lockstep.audit.rules import all_codes
from lockstep.audit.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.finding import Finding
    from lockstep.audit.options import FailOn

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(findings: Sequence[Finding], summary: dict[str, Any], fail_on: FailOn) -> str:
    """The suite as a document."""
    suite = ElementTree.Element("testsuite", name="lockstep audit")
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    asked = Selection(tuple(summary["only"]), tuple(summary["ignore"]))
    rules = {code: rule.name for code, rule in sorted(all_codes().items()) if asked.takes(code)}
    for code, name in {"": "the run", **rules}.items():
        case = ElementTree.SubElement(
            suite, "testcase", classname="lockstep.audit", name=f"{code} {name}".strip()
        )
        if code:
            own = [finding for finding in findings if finding.code == code]
            outcome = _judge(case, own, _why_not_passed(code, findings, summary), fail_on)
        else:
            outcome = _judge_run(case, summary)
        counts["tests"] += 1
        if outcome is not None:
            counts[outcome] += 1
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _judge_run(case: ElementTree.Element, summary: dict[str, Any]) -> str | None:
    if summary["unseen"]:
        told = _NOT_IN_XML.sub("?", "\n".join(summary["unseen"]))
        ElementTree.SubElement(case, "system-err").text = told
    if summary["finished"] is not None and not summary["failed"]:
        return None
    was = "not run" if summary["finished"] is None else "ended by an error"
    ElementTree.SubElement(case, "error", message=f"the script was {was}")
    return "errors"


def _judge(
    case: ElementTree.Element,
    findings: Sequence[Finding],
    instead: tuple[str, str] | None,
    fail_on: FailOn,
) -> str | None:
    """Write down what became of a rule; under which count, None for one that has passed.

    Args:
        instead: of passing, see `_why_not_passed`.
    """
    told = _NOT_IN_XML.sub("?", "\n\n".join(map(_text, findings)))
    if fail_on != "never" and any(
        f.code == BLIND or is_at_least(f.severity, fail_on) for f in findings
    ):
        message = _NOT_IN_XML.sub("?", findings[0].message)
        ElementTree.SubElement(case, "failure", message=message).text = told
        return "failures"
    if findings:
        ElementTree.SubElement(case, "system-out").text = told
    elif instead is not None:
        element, why = instead
        ElementTree.SubElement(case, element, message=_NOT_IN_XML.sub("?", why))
        return "errors" if element == "error" else element
    return None


def _why_not_passed(
    code: str, findings: Sequence[Finding], summary: dict[str, Any]
) -> tuple[str, str] | None:
    """Which element a rule without findings has, and why; None where all ranks were compared."""
    if code in summary["failed_rules"]:
        return "error", "the rule raised an error: see the output of the run"
    for finding in findings:
        if finding.code == BLIND:
            return "skipped", finding.message
    if not summary["steps"]:
        return "skipped", "no optimizer step was seen, so nothing was compared"
    if summary["world_size"] == 1:
        return "skipped", "one process trained: nothing to compare"
    return None


def _text(finding: Finding) -> str:
    where = "".join(f"\nat {place}: {place.text}" for place in finding.where)
    return f"{finding.severity} {finding.code}: {finding.message}\nfix: {finding.fix}{where}"
