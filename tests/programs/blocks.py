# SPDX-License-Identifier: Apache-2.0
"""The code blocks of a page, run as its reader would run them.

A Python block that begins with ``# name.py`` is that file, and one that begins with ``# name.py,
continued`` is the rest of it; the others, one after the other, are one program. Then come the
commands of the bash blocks, in order, in the same folder, where the programs also are that the page
shows the source of. A text block that follows commands shows what they print; a line ``...`` in it
stands for any number of lines.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FENCED = re.compile(
    r"(?P<maker><!-- (?:source|run): [^\n]*-->\n)?"
    r"^(?P<fence>```+)(?P<language>[^\n]*)\n(?P<body>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
SHOWN = re.compile(r"^<!-- source: (\S+)", re.MULTILINE)
FILE = re.compile(r"# (?P<name>[\w-]+\.py)(?P<goes_on>, continued)?\n")
EXIT_CODE = re.compile(r"# exit code (\d+)")
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]\d+)?%?)")

YOURS = {"lockstep audit train.py --your-own arguments"}
"""About a program of the reader's; docs/audit.md runs the same about one of ours."""

PROGRAMS = {
    "python": [sys.executable],
    "lockstep": [sys.executable, "-m", "lockstep.cli"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: what follows the fence.
        body: its lines.
        is_made: docs/refresh.py puts it there.
    """

    language: str
    body: str
    is_made: bool

    @property
    def commands(self) -> list[str]:
        """The lines of a bash block, continued ones as one."""
        if self.language != "bash":
            return []
        lines = self.body.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.split("#")[0].strip()]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["body"], found["maker"] is not None)
        for found in FENCED.finditer(text)
    ]


def is_run(command: str) -> bool:
    """A command that starts a program of the page, or of ours."""
    return shlex.split(command, comments=True)[0] in PROGRAMS and command not in YOURS


def files_of(page: Path) -> dict[str, str]:
    """The page's Python blocks by the file that they belong to."""
    files: dict[str, str] = {}
    for block in blocks_of(page):
        if block.language != "python" or block.is_made:
            continue
        named = FILE.match(block.body)
        name = named["name"] if named else f"{page.stem.replace('-', '_')}_page.py"
        assert not (named and named["goes_on"]) or name in files, f"{name} does not begin"
        files[name] = f"{files[name]}\n\n{block.body}" if name in files else block.body
    return files


def run(command: list[str], folder: Path, *, exit_code: int = 0, typed: str = "") -> str:
    """What a command prints."""
    paths = [str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # A cluster, and a port, of its own: others run on this machine.
        "RAY_ADDRESS": "local",
        "PET_STANDALONE": "1",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, f"{command}\n{done.stdout}{done.stderr}"
    # The audit's report does not get into what the audited program prints.
    return done.stdout + (done.stderr if "audit" in command else "")


def run_page(page: Path, folder: Path, typed: str = "") -> None:
    """Run everything on a page that can be run, and compare what it shows."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for program in SHOWN.findall(page.read_text(encoding="utf-8")):
        (folder / Path(program).name).symlink_to(page.parent / program)
    for name, text in files_of(page).items():
        (folder / name).write_text(text, encoding="utf-8")
        if name.endswith("_page.py"):
            run([sys.executable, name], folder, typed=typed)
    printed: str | None = None
    for block in blocks_of(page):
        for command in filter(is_run, block.commands):
            program, *arguments = shlex.split(command, comments=True)
            code = EXIT_CODE.search(command)
            printed = (printed or "") + run(
                [*PROGRAMS[program], *arguments],
                folder,
                exit_code=int(code[1]) if code else 0,
                typed=typed,
            )
        if block.language == "text" and not block.is_made and printed is not None:
            compare(block.body, printed)
        if block.language != "bash":
            printed = None


def compare(shown: str, printed: str) -> None:
    """Assert that `shown` is what was printed; measured numbers only about."""
    pattern = ""
    numbers: list[str] = []
    for line in shown.splitlines():
        if line == "...":
            pattern += r"(?:[^\n]*\n)*?"
            continue
        for place, part in enumerate(NUMBER.split(line)):
            if place % 2:
                numbers.append(part)
                pattern += NUMBER.pattern
            else:
                pattern += r"\s+".join(map(re.escape, re.split(r"\s+", part)))
        pattern += r"[ ]*\n"
    found = re.fullmatch(pattern, printed)
    assert found is not None, f"shown:\n{shown}\nprinted:\n{printed}"
    for expected, got in zip(numbers, found.groups(), strict=True):
        assert is_about(expected, got), f"shown {expected}, printed {got}:\n{printed}"


def is_about(expected: str, got: str) -> bool:
    """Whole numbers are equal, the others alike: processors round differently."""
    if "e" in expected:
        return abs(math.log10(float(got) or 1e-7) - math.log10(float(expected) or 1e-7)) < 1.5
    if "%" in expected:
        return got.endswith("%") and abs(float(expected[:-1]) - float(got[:-1])) <= 3
    if "." in expected:
        return abs(float(expected) - float(got)) <= 0.05 + 0.1 * float(expected)
    return expected == got
