# SPDX-License-Identifier: Apache-2.0
"""The demo's packages with their hashes are those that the tests run with."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = (ROOT / "examples" / "requirements.txt").read_text()
PINNED = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)


def pins(text):
    return {name.lower().replace("_", "-"): version for name, version in PINNED.findall(text)}


def test_the_locked_versions_are_those_of_the_constraints():
    locked, tested = pins(LOCK), pins((ROOT / "constraints.txt").read_text())
    assert {name: locked[name] for name in locked.keys() & tested.keys()} == {
        name: tested[name] for name in locked.keys() & tested.keys()
    }
    # Those for CUDA come with torch's wheel; colorama is for Windows.
    others = {each for each in locked.keys() - tested.keys() if not each.startswith("nvidia-")}
    assert others == {"colorama", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "triton"}


def test_everything_that_lockstep_needs_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["ray"], "scikit-learn"]
    assert {re.match(r"[\w-]+", each)[0] for each in needed} <= pins(LOCK).keys()


def test_every_file_has_a_hash():
    # A requirement goes on in the lines that follow, each of which is a hash.
    for requirement in re.split(r"\n(?=\w)", LOCK.rstrip())[1:]:
        assert requirement.count("--hash=sha256:") == requirement.count("\n") >= 1, requirement
    assert "://" not in LOCK
