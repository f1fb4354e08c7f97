# SPDX-License-Identifier: Apache-2.0
"""What users hold on to changes on purpose only: `tests/public_surface.json` is what was accepted.

`tests.public_surface` reads the surface off the code, and says what belongs to it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import typing_extensions
from tests.public_surface import (
    FILE,
    ROOT,
    Shown,
    Surface,
    _described,
    as_json,
    deprecation,
    differences,
    parameters,
    read,
    reference,
    surface,
    text_of,
    wrong_deprecations,
)

import lockstep

SOURCE = Path(lockstep.__file__).parent

OF_OURS = {"lockstep.collectives", "lockstep.engine", "lockstep.sync", "lockstep.worker"}
"""Packages whose ``__all__`` is for lockstep's other packages; the reference shows none of it."""

ACCEPT = (
    "\nIf that is meant: `python -m tests.public_surface` writes it to the file, and it needs a"
    " line in CHANGELOG.md (docs/versions.md says what may change when)."
)

SOME: Surface = {
    "names": {
        "lockstep.gather": ["function", "x", "*", "dim=0"],
        "lockstep.local": ["function", "module"],
    },
    "exit codes": {"audit: 65": ["FOUND"]},
}


@pytest.fixture(scope="module")
def now() -> Surface:
    return surface()


def test_the_public_surface_is_the_one_that_was_accepted(now: Surface) -> None:
    found = differences(read(), now)
    if found:
        said = "the public surface has changed:\n" + "\n".join(found) + ACCEPT
        pytest.fail(said, pytrace=False)


def test_the_file_is_written_as_it_is_read() -> None:
    assert as_json(read()) == FILE.read_text(encoding="utf-8")
    assert {section: sorted(entries) for section, entries in read().items()} == {
        section: list(entries) for section, entries in read().items()
    }


def test_nothing_public_is_left_out(now: Surface) -> None:
    """A new page of the reference, and a new package with an ``__all__``, are decisions too."""
    names = now["names"]
    assert [name for name in lockstep.__all__ if f"lockstep.{name}" not in names] == []
    shown = {name for name in reference() if ".operator_factories." not in name}
    assert len(shown) > 40
    assert shown - names.keys() == set()
    modules = {
        ".".join(("lockstep", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in SOURCE.rglob("*.py")
        if "\n__all__ = [" in path.read_text(encoding="utf-8")
    }
    with_all = {module.removesuffix(".__init__") for module in modules}
    public = {name.rpartition(".")[0] for name in names}
    assert with_all - public == OF_OURS


def test_the_sections_hold_what_they_are_for(now: Surface) -> None:
    assert "num_workers=1" in now["names"]["lockstep.TorchTrainer"]
    assert now["names"]["lockstep.TorchTrainer.train"][:2] == ["method", "num_steps=None"]
    assert now["lockstep.keys"]["BATCH_SIZE"] == ["'*batch_size'"]
    assert now["lockstep.errors"]["CheckpointError"] == ["LS006", "(LockstepError, ValueError)"]
    assert now["rules of the audit"]["LS101"][1] == "error"
    assert now["exit codes"]["audit: 65"] == ["FOUND"]
    assert "one of error warning never" in now["command line"]["lockstep audit --fail-on"]
    assert now["JSON of the audit"]["findings[].step"] == ["int or null"]
    assert now["JSON of the audit"]["findings[].where[].line"] == ["int"]


def test_the_same_surface_has_no_differences() -> None:
    assert differences(SOME, json.loads(as_json(SOME))) == []


def test_what_was_added_is_told() -> None:
    more = copy.deepcopy(SOME)
    more["names"]["lockstep.scatter"] = ["function", "x"]
    assert differences(SOME, more) == ["added    names: lockstep.scatter: function, x"]
    more = copy.deepcopy(SOME) | {"formats": {"checkpoint": [2]}}
    assert differences(SOME, more) == ["added    formats: checkpoint: 2"]


def test_what_was_removed_is_told() -> None:
    less = copy.deepcopy(SOME)
    del less["names"]["lockstep.local"]
    assert differences(SOME, less) == ["removed  names: lockstep.local: function, module"]
    del less["exit codes"]
    assert "removed  exit codes: audit: 65: FOUND" in differences(SOME, less)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (["function", "x", "*", "dim=1"], "dim=0 -> dim=1"),
        (["function", "x", "*"], "dim=0 -> nothing"),
        (["function", "x", "*", "dim=0", "group"], "nothing -> group"),
        (["function", "x", "dim=0"], "* -> nothing"),
        (["function", "*", "x", "dim=0"], "function, x, *, dim=0 -> function, *, x, dim=0"),
    ],
)
def test_what_was_changed_is_told(entry: list[str | int], told: str) -> None:
    changed = copy.deepcopy(SOME)
    changed["names"]["lockstep.gather"] = entry
    assert differences(SOME, changed) == [f"changed  names: lockstep.gather: {told}"]


def test_parameters_are_as_python_writes_them() -> None:
    def function(a, /, b, c=1.0, *rest, d, e=(None,), **further): ...

    def named(*, a=len): ...

    assert parameters(function) == [
        *("a", "/", "b", "c=1.0", "*rest", "d", "e=(None,)", "**further")
    ]
    assert parameters(named) == ["*", "a=len"]
    assert parameters(lambda a, /: a) == ["a", "/"]


def test_a_default_has_the_same_text_in_every_process() -> None:
    assert text_of(object()) == "<object>"
    assert text_of(frozenset({"b", "a", "c"})) == "{'a', 'b', 'c'}"
    assert text_of({"a": [1, Path]}) == "{'a': [1, Path]}"


SINCE = "lockstep 0.3 removes it; use `gather`"


class Old:
    @typing_extensions.deprecated(SINCE)
    def method(self, x=1): ...

    @property
    @typing_extensions.deprecated(SINCE)
    def size(self): ...

    @classmethod
    @typing_extensions.deprecated(SINCE)
    def made(cls): ...

    def kept(self): ...


def test_what_is_deprecated_says_so_in_the_surface() -> None:
    @typing_extensions.deprecated(SINCE)
    def function(x, *, dim=0): ...

    told = f"deprecated: {SINCE}"
    assert _described("a", function, Shown(True, None)) == {
        "a": ["function", "x", "*", "dim=0", told]
    }

    @typing_extensions.deprecated(SINCE)
    class Whole:
        def __init__(self, x): ...

    assert _described("A", Whole, Shown(False, frozenset())) == {"A": ["class", "...", told]}
    assert deprecation(Old) == deprecation(Old.kept) == []
    members = vars(Old)
    assert [deprecation(members[name]) for name in ("method", "size", "made")] == [[told]] * 3


def test_whoever_deprecates_says_when_and_what_instead(now: Surface) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert wrong_deprecations(now, lockstep.__version__, changelog) == []


LISTED = "## [0.2]\n\n### Deprecated\n\n- `a`: use `b`.\n\n### Fixed\n\n- `c`\n"


@pytest.mark.parametrize(
    ("name", "message", "version", "wrong"),
    [
        ("a", SINCE, "0.2.0.dev0", []),
        ("a", SINCE, "0.3.0.dev0", ["a is still in 0.3.0.dev0"]),
        ("a", SINCE, "1.0.0", ["a is still in 1.0.0"]),
        ("a", "use b", "0.2.0", ["a has to say `lockstep X.Y removes it; use ...`"]),
        ("c", SINCE, "0.2.0", ["c is not under Deprecated in CHANGELOG.md"]),
    ],
)
def test_a_deprecation_that_says_too_little(
    name: str, message: str, version: str, wrong: list[str]
) -> None:
    surface: Surface = {
        "names": {"kept": ["function"], name: ["function", f"deprecated: {message}"]}
    }
    assert wrong_deprecations(surface, version, LISTED) == wrong
