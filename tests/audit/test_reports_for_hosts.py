# SPDX-License-Identifier: Apache-2.0
"""SARIF, GitHub's annotations and JUnit say what the terminal says, in their own formats."""

import json
import subprocess
from xml.etree import ElementTree

import jsonschema
import pytest

from audit.commands import audit
from audit.ledgers import of_one_step
from audit.traces import TRACES, read_trace
from lockstep.audit.finding import Finding, Place
from lockstep.audit.judgement import judge
from lockstep.audit.options import Options
from lockstep.audit.outcome import exit_code_of, report, write_files
from lockstep.audit.report.github_annotations import github_annotations
from lockstep.audit.report.sarif import sarif
from lockstep.audit.rules import all_codes
from lockstep.cli import main


def objects(required, **optional):
    """The schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "minLength": 1}
MESSAGE = objects({"text": TEXT})
LEVEL = {"enum": ["error", "warning", "note"]}
LOCATION = objects(
    {
        "physicalLocation": objects(
            {
                "artifactLocation": objects(
                    {"uri": {**TEXT, "pattern": r"^(file:///)?[\w./%-]+$"}},
                    uriBaseId={"enum": ["SRCROOT"]},
                ),
                "region": objects(
                    {"startLine": {"type": "integer", "minimum": 1}}, snippet=MESSAGE
                ),
            }
        ),
        "logicalLocations": {
            "type": "array",
            "items": objects({"name": TEXT, "kind": {"const": "function"}}),
        },
        "message": MESSAGE,
    }
)
RULE = objects(
    {
        "id": TEXT,
        "name": TEXT,
        "shortDescription": MESSAGE,
        "defaultConfiguration": objects({"level": LEVEL}),
    },
    help=objects({"text": TEXT, "markdown": TEXT}),
)
RESULT = objects(
    {
        "ruleId": TEXT,
        "ruleIndex": {"type": "integer", "minimum": 0},
        "level": LEVEL,
        "message": MESSAGE,
        "partialFingerprints": objects({"lockstepFinding/v1": TEXT}),
        "properties": {"type": "object"},
    },
    locations={"type": "array", "items": LOCATION, "minItems": 1, "maxItems": 1},
    relatedLocations={"type": "array", "items": LOCATION},
)
RUN = objects(
    {
        "tool": objects(
            {
                "driver": objects(
                    {"name": TEXT, "version": TEXT, "rules": {"type": "array", "items": RULE}}
                )
            }
        ),
        "invocations": {
            "type": "array",
            "items": objects(
                {"executionSuccessful": {"type": "boolean"}},
                commandLine=TEXT,
                endTimeUtc={"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
                toolExecutionNotifications={
                    "type": "array",
                    "items": objects({"level": LEVEL, "message": MESSAGE}),
                },
            ),
        },
        "originalUriBaseIds": objects({"SRCROOT": objects({"uri": TEXT})}),
        "results": {"type": "array", "items": RESULT},
    }
)
LOG = objects(
    {
        "$schema": TEXT,
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "items": RUN, "minItems": 1, "maxItems": 1},
    }
)
"""The part of SARIF 2.1.0 that is written; names and types are those of the standard's schema."""

SUMMARY = {
    "steps": 3,
    "world_size": 2,
    "failed": False,
    "lockstep": "0.1.0",
    "command": ["train.py"],
    "finished": "2026-01-02T03:04:05+00:00",
    "only": [],
    "ignore": [],
    "unseen": [],
    "failed_rules": [],
}


def finding(severity="error", where=(), **given):
    given = {"message": "half of it, 50%: x, y", "fix": "call the wrapper", **given}
    return Finding("LS101", "gradients passed no reduction", severity, where=list(where), **given)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a program in it; the current directory is below its root."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "train.py").write_text("step()\n")
    monkeypatch.chdir(tmp_path / "a b")
    return tmp_path


def place(path, line=1):
    return Place(str(path), line, "main", "step()")


def validated(log):
    jsonschema.validate(log, LOG)
    return log["runs"][0]


def test_a_place_is_relative_to_the_checkout(checkout):
    inside, library = place(checkout / "a b" / "train.py", 7), place(jsonschema.__file__, 2)
    run = validated(sarif([finding(where=[library, inside])], SUMMARY))
    (result,) = run["results"]
    assert result["level"] == "error"
    # The first line that the host has; a library's is told beside it.
    (at,) = result["locations"]
    assert at["physicalLocation"]["artifactLocation"] == {
        "uri": "a%20b/train.py",
        "uriBaseId": "SRCROOT",
    }
    assert at["physicalLocation"]["region"]["startLine"] == 7
    (beside,) = result["relatedLocations"]
    assert beside["physicalLocation"]["artifactLocation"]["uri"].startswith("file:///")
    assert run["originalUriBaseIds"]["SRCROOT"]["uri"] == f"{checkout.as_uri()}/"


def test_a_finding_without_a_place_is_shown_at_the_script(checkout):
    (result,) = validated(sarif([finding("notice")], SUMMARY))["results"]
    assert result["level"] == "note"
    assert "a%20b/train.py" in json.dumps(result["locations"])
    # The name of a module is no file.
    (result,) = validated(sarif([finding()], SUMMARY | {"command": ["-m", "train"]}))["results"]
    assert "locations" not in result


def test_a_finding_is_known_again_after_lines_have_moved(checkout):
    def fingerprint(**given):
        (result,) = validated(sarif([finding(**given)], SUMMARY))["results"]
        return result["partialFingerprints"]

    file = checkout / "a b" / "train.py"
    first = fingerprint(where=[place(file, 3)], evidence={"scale": 0.5})
    assert fingerprint(where=[place(file, 9)], evidence={"scale": 0.49}) == first
    assert fingerprint(where=[place(file, 3)], parameters=["weight"]) != first


def test_annotations_are_escaped_and_the_gravest_comes_first(checkout):
    told = github_annotations([finding("notice"), finding(where=[place("train.py", 3)])])
    assert told.splitlines() == [
        "::error file=a b/train.py,line=3,title=LS101%3A gradients passed no reduction"
        "::half of it, 50%25: x, y%0Acall the wrapper",
        "::notice title=LS101%3A gradients passed no reduction"
        "::half of it, 50%25: x, y%0Acall the wrapper",
    ]


def _cases(path):
    return ElementTree.parse(path).getroot()


def suite(tmp_path, findings, fail_on="error", **changes):
    write_files({"junit": str(tmp_path / "it.xml")}, findings, SUMMARY | changes, fail_on)
    root = _cases(tmp_path / "it.xml")
    cases = {case.get("name"): [child.tag for child in case] for case in root}
    counts = {name: int(root.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    return cases, counts


RULE_NAME = "LS101 gradients passed no reduction"


def test_a_rule_fails_as_fail_on_says(tmp_path):
    whole = 1 + len(all_codes())
    for severity, fail_on, tags in (
        ("error", "error", ["failure"]),
        ("warning", "error", ["system-out"]),
        ("warning", "warning", ["failure"]),
        ("error", "never", ["system-out"]),
    ):
        cases, counts = suite(tmp_path, [finding(severity)], fail_on)
        assert cases.pop(RULE_NAME) == tags
        assert not any(cases.values())
        failures = int(tags == ["failure"])
        assert counts == {"tests": whole, "failures": failures, "errors": 0, "skipped": 0}


@pytest.mark.parametrize("changes", [{"steps": 0}, {"world_size": 1}])
def test_no_rule_passes_where_nothing_was_compared(tmp_path, changes):
    cases, counts = suite(tmp_path, [], **changes)
    assert cases.pop("the run") == []
    assert set(map(tuple, cases.values())) == {("skipped",)}
    assert counts["skipped"] == len(cases)


def test_a_script_that_failed_is_an_error_of_the_suite(tmp_path):
    cases, counts = suite(tmp_path, [], failed=True)
    assert (cases["the run"], counts["errors"]) == (["error"], 1)


def test_what_xml_cannot_hold_is_left_out(tmp_path):
    cases, _ = suite(tmp_path, [finding(message="a\x00b\x1b[1m <&>")])
    assert cases[RULE_NAME] == ["failure"]


def test_rules_that_were_not_asked_for_are_no_tests(tmp_path):
    cases, _ = suite(tmp_path, [], only=["LS1"], ignore=["LS101"])
    assert RULE_NAME not in cases
    assert all(name.startswith(("LS1", "LS406")) for name in cases if name != "the run")


def test_the_files_of_a_report(tmp_path, capsys):
    files = {name: str(tmp_path / name) for name in ("json", "sarif", "junit")}
    ledgers = [of_one_step(*each) for each in enumerate((1.0, 2.0))]
    found = report(Options("train.py", [], **files, github=True), ledgers, 2)
    assert found
    run = validated(json.loads((tmp_path / "sarif").read_text()))
    assert [result["ruleId"] for result in run["results"]] == [each.code for each in found]
    assert capsys.readouterr().out == f"\n{github_annotations(found)}"
    assert ElementTree.parse(tmp_path / "junit").getroot().get("failures") != "0"


def test_what_the_audit_could_not_look_at_is_in_every_file(tmp_path, capsys):
    files = {name: tmp_path / name for name in ("json", "sarif", "junit", "html")}
    ledgers = [of_one_step(rank, 1.0) for rank in range(2)]
    for ledger in ledgers:
        ledger.facts.unseen.append("_state: AttributeError: no items")
        ledger.facts.failed_rules.append("LS101")
    report(Options("train.py", [], **{name: str(path) for name, path in files.items()}), ledgers, 2)
    held = json.loads(files["json"].read_text())
    assert (held["unseen"], held["failed_rules"]) == (ledgers[0].facts.unseen, ["LS101"])
    (invocation,) = validated(json.loads(files["sarif"].read_text()))["invocations"]
    (told,) = invocation["toolExecutionNotifications"]
    assert told == {"level": "warning", "message": {"text": ledgers[0].facts.unseen[0]}}
    root = _cases(files["junit"])
    cases = {case.get("name"): [child.tag for child in case] for case in root}
    assert (cases["the run"], cases[RULE_NAME]) == (["system-err"], ["error"])
    assert root.get("errors") == "1"
    for text in (files["html"].read_text(), capsys.readouterr().err):
        assert f"could not look at everything, e.g. {ledgers[0].facts.unseen[0]}" in text


def test_that_nothing_could_be_looked_at_is_told_whatever_was_asked_for(tmp_path):
    files = {name: tmp_path / name for name in ("json", "sarif", "junit")}
    ledgers = [of_one_step(rank, 1.0) for rank in range(2)]
    ledgers[1].facts.blind = "torch was hidden"
    options = Options(
        "train.py",
        [],
        only=("LS1",),
        ignore=("LS4",),
        **{name: str(path) for name, path in files.items()},
    )
    found = report(options, ledgers, 2)
    assert [each.code for each in found] == ["LS406"]
    assert exit_code_of(found, "error") == 66
    (each,) = json.loads(files["json"].read_text())["findings"]
    assert each["code"] == "LS406"
    run = validated(json.loads(files["sarif"].read_text()))
    (told,) = run["invocations"][0]["toolExecutionNotifications"]
    assert told == {"level": "error", "message": {"text": each["message"]}}
    assert [result["ruleId"] for result in run["results"]] == ["LS406"]
    cases = {case.get("name"): [child.tag for child in case] for case in _cases(files["junit"])}
    assert (cases.pop("the run"), cases.pop("LS406 the audit could not look")) == ([], ["failure"])
    assert set(map(tuple, cases.values())) == {("skipped",)}


def test_a_run_that_did_not_come_about_leaves_no_older_files(tmp_path):
    paths = {name: tmp_path / name for name in ("sarif", "junit")}
    for path in paths.values():
        path.write_text("older")
    options = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    assert main(["audit", *options, str(tmp_path / "none.py")]) == 2
    run = validated(json.loads(paths["sarif"].read_text()))
    assert (run["results"], run["invocations"]) == ([], [{"executionSuccessful": False}])
    assert ElementTree.parse(paths["junit"]).getroot().get("errors") == "1"


@pytest.mark.slow
def test_a_broken_script_in_a_checkout(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(4):\n"
        "    torch.manual_seed(10 * step + dist.get_rank())\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(8, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    done = audit("--sarif", "found.sarif", "--github", "train.py", cwd=tmp_path)
    assert done.returncode == 65
    run = validated(json.loads((tmp_path / "found.sarif").read_text()))
    (result,) = [each for each in run["results"] if each["ruleId"] == "LS101"]
    (at,) = result["locations"]
    assert at["physicalLocation"]["artifactLocation"]["uri"] == "train.py"
    line = at["physicalLocation"]["region"]["startLine"]
    assert f"\n::error file=train.py,line={line},title=LS101%3A " in done.stdout


def test_the_audit_tells_its_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["audit", "--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("lockstep-train ")


@pytest.mark.slow
def test_the_findings_of_every_recorded_program_are_in_the_format():
    count = 0
    for trace in sorted(TRACES.glob("*/*.json.xz")):
        found = judge(read_trace(trace))
        count += len(found)
        validated(json.loads(json.dumps(sarif(found, SUMMARY))))
    assert count > 100
