# SPDX-License-Identifier: Apache-2.0
"""Random changes of the source, one at a time: how many of them do the tests notice?

    make mutants PACKAGE=sync COUNT=300 SEED=1 SECONDS=3600

A mutant is one expression or statement of a package, changed: a comparison turned round, a
condition held to be true, a call left out. Each is put into a copy of the source, and the tests of
its package run until one fails. One that no test notices survives: either nothing depends on what
it changed, or a test is missing. The same seed draws the same mutants from the same source; what
was judged is kept in out/mutants, so a run that was cut off goes on where it ended.

The mutants are drawn here and not by a library, because the two that are kept up cannot serve:
mutmut finds the tests of a function by its calls in one process, and here a rank is a process of
its own; cosmic-ray takes one test command for every file, leaves out no statement, and mutates
annotations, which nothing evaluates. Leaving out statements says the most about tests (Deng,
Offutt and Li, "Empirical evaluation of the statement deletion mutation operator", 2013).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "lockstep"
KEPT = ROOT / "out" / "mutants"

# Each run of the tests is forked from a process that has torch already, and never lockstep, which
# is another one each time.
_FORKSERVER: Final = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "pytest"])


class Package(NamedTuple):
    """What is mutated, below src/lockstep, and the tests that judge it, cheap ones first."""

    source: tuple[str, ...]
    tests: tuple[str, ...]


PACKAGES: Final = {
    "sync": Package(
        ("sync",),
        ("tests/unit/sync", "tests/ranks", "tests/procs", "tests/ray/test_parameter_server.py"),
    ),
    "data": Package(
        ("data",),
        (
            "tests/unit/data",
            "tests/ray/test_ranks_that_differ.py",
            "tests/ray/test_ray_dataset.py",
            "tests/ray/test_same_bits.py",
        ),
    ),
    "checkpoint": Package(
        ("checkpoint",),
        (
            "tests/unit/checkpoint",
            "tests/ray/test_durable.py",
            "tests/ray/test_units_trainer.py",
            "tests/released",
        ),
    ),
    "recovery": Package(
        ("recovery",),
        (
            "tests/unit/recovery",
            "tests/ray/test_recovery.py",
            "tests/ray/test_failures.py",
            "tests/ray/test_going_on.py",
        ),
    ),
    "audit": Package(
        (
            "audit/by_design.py",
            "audit/dealt.py",
            "audit/diagnoses",
            "audit/equations.py",
            "audit/expectation.py",
            "audit/judgement.py",
            "audit/mixing.py",
            "audit/precedence.py",
            "audit/rules",
        ),
        ("tests/audit/test_traces.py", "tests/audit/test_mixing.py", "tests/audit/test_dealt.py"),
    ),
}
"""Of the audit, what its verdicts are made of. Tests that are slow, and bounds on seconds, are
left out everywhere."""

_COMPARED: Final = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: Final = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# Nothing evaluates annotations; a decorator that is left out or changed is rarely a mistake that
# somebody makes.
_NOT_MUTATED: Final = {"annotation", "returns", "decorator_list"}


@dataclass(frozen=True)
class Mutant:
    """One change: in `file`, below src/lockstep, `old` at this place of the text becomes `new`."""

    file: str
    line: int
    column: int
    start: int
    old: str
    new: str

    def text(self, text: str) -> str:
        """The file's text with the change in it."""
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    def __str__(self) -> str:
        old, new = (" ".join(side.split()) for side in (self.old, self.new))
        return f"{self.file}:{self.line}:{self.column}  {old}  ->  {new}"


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that is evaluated when a program runs."""
    if isinstance(node, ast.JoinedStr) or _is_for_types(node):
        return  # Python 3.11 gives what stands in an f-string wrong positions
    yield node
    for name, value in ast.iter_fields(node):
        if name not in _NOT_MUTATED:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _changed_expressions(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in place of an expression in its mutants."""
    match node:
        case ast.Compare(left=left, ops=[op, *ops], comparators=others):
            yield ast.Compare(left, [_COMPARED[type(op)](), *ops], others)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _COMPUTED:
            yield ast.BinOp(left, _COMPUTED[type(op)](), right)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Call(func=function, args=args, keywords=keywords):
            for dropped in keywords:
                kept = [keyword for keyword in keywords if keyword is not dropped]
                yield ast.Call(function, args, kept)


def _changed_statements(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in place of a statement in its mutants."""
    match node:
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield ast.Return(None)
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.AugAssign():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its text; some of them may not compile."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines()

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def mutant(old: ast.expr | ast.stmt, new: ast.AST) -> Mutant:
        start = offset(old.lineno, old.col_offset)
        end = offset(old.end_lineno or old.lineno, old.end_col_offset or 0)
        shown = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
        return Mutant(file, old.lineno, old.col_offset, start, text[start:end], shown)

    for node in _nodes(ast.parse(text)):
        if isinstance(node, ast.If):
            yield from (mutant(node.test, ast.Constant(value)) for value in (True, False))
        elif isinstance(node, ast.expr):
            yield from (mutant(node, change) for change in _changed_expressions(node))
        elif isinstance(node, ast.stmt):
            yield from (mutant(node, change) for change in _changed_statements(node))


def _compiles(mutant: Mutant, text: str) -> bool:
    try:
        compile(mutant.text(text), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def files_of(package: str) -> list[str]:
    """The files of a package that are mutated, below src/lockstep."""
    places = (SOURCE / place for place in PACKAGES[package].source)
    files = (
        file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))
    )
    return sorted(str(file.relative_to(SOURCE)) for file in files)


def drawn(package: str, count: int, seed: int) -> list[Mutant]:
    """`count` mutants of a package, or all where there are fewer."""
    texts = {file: (SOURCE / file).read_text(encoding="utf-8") for file in files_of(package)}
    every = [mutant for file, text in texts.items() for mutant in mutants_of(file, text)]
    random.Random(f"{package}:{seed}").shuffle(every)
    compiled = (mutant for mutant in every if _compiles(mutant, texts[mutant.file]))
    return [mutant for mutant, _ in zip(compiled, range(count), strict=False)]


def source_digest(package: str) -> str:
    """Eight digits that change with the text of what is mutated."""
    texts = b"".join((SOURCE / file).read_bytes() for file in files_of(package))
    return hashlib.sha256(texts).hexdigest()[:8]


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a mutant, after how long, and by which test that failed."""

    mutant: str
    outcome: str
    seconds: float
    by: str | None = None


class Copies:
    """Copies of the source, one for each job, in which the tests run."""

    def __init__(self, folder: Path, package: str, jobs: int) -> None:
        self.package = package
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._noticed: dict[str, list[str]] = {}
        for job in range(jobs):
            place = folder / str(job)
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "src", place / "src", ignore=ignored)
            self._free.put(place)

    def judge(self, mutant: Mutant | None, limit_s: float) -> Verdict:
        """Run the package's tests with `mutant`, or without one, until one fails."""
        place = self._free.get()
        try:
            if mutant is None:
                return self._run(place, "nothing is changed", [], limit_s)
            file = place / "src" / "lockstep" / mutant.file
            text = file.read_text(encoding="utf-8")
            file.write_text(mutant.text(text), encoding="utf-8")
            known = self._noticed.setdefault(mutant.file, [])
            try:
                verdict = self._run(place, str(mutant), [*known, *_tests_of(mutant.file)], limit_s)
            finally:
                file.write_text(text, encoding="utf-8")
            if verdict.by is not None and verdict.by not in known:
                known.insert(0, verdict.by)
            return verdict
        finally:
            self._free.put(place)

    def _run(self, place: Path, name: str, first: list[str], limit_s: float) -> Verdict:
        started = time.monotonic()
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not alone"]
        options += ["--basetemp", str(place / "tests")]
        output = place / "output.txt"  # a pipe would stay open as long as a process of the tests
        tests = _FORKSERVER.Process(
            target=_run_pytest,
            args=(place / "src", output, [*options, *first, *PACKAGES[self.package].tests]),
        )
        tests.start()
        try:
            tests.join(limit_s)
            code = tests.exitcode
        finally:
            _end(tests)
        said = output.read_text(encoding="utf-8", errors="replace")
        if code in (4, 5):  # pytest: wrong arguments; no tests
            raise RuntimeError(said)
        outcome = {0: "survived", None: "hung"}.get(code, "noticed")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S+)(?: - |$)", said, re.MULTILINE)
        by = failed.group(1) if failed else None
        return Verdict(name, outcome, round(time.monotonic() - started, 1), by)


def _run_pytest(source: Path, output: Path, arguments: list[str]) -> None:
    """Run tests on the copy `source`, in a session of their own, with their output in a file."""
    os.setsid()
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(ROOT)
    path = [str(source), str(ROOT)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:0] = path
    sys.dont_write_bytecode = True
    import pytest

    raise SystemExit(int(pytest.main(arguments)))


def _end(tests: BaseProcess) -> None:
    """End the tests and whatever they have started; what is over stays over."""
    assert tests.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(tests.pid, signal.SIGKILL)
    tests.join()


def _tests_of(file: str) -> list[str]:
    """The test file that mirrors a file of the source, which notices the soonest."""
    path = Path(file)
    mirror = Path("tests", "unit", path.parent, f"test_{path.name}")
    return [str(mirror)] if (ROOT / mirror).exists() else []


def judged(
    package: str, mutants: list[Mutant], kept: Path, jobs: int, until: float
) -> list[Verdict]:
    """The verdicts on as many of `mutants` as there is time for, read from `kept` where known."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    verdicts = {known.mutant: known for known in (Verdict(**json.loads(line)) for line in lines)}
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-mutants-") as folder:
        copies = Copies(Path(folder), package, jobs)
        unchanged = copies.judge(None, limit_s=1800.0)
        if unchanged.outcome != "survived":
            said = next(Path(folder).glob("*/output.txt")).read_text(errors="replace")
            raise SystemExit(f"{said}\nthe tests of {package} fail before anything is changed")
        limit_s = 60.0 + 2 * unchanged.seconds
        print(f"{package}: its tests take {unchanged.seconds:.0f} s", flush=True)

        def judge(mutant: Mutant) -> None:
            if str(mutant) in verdicts or time.monotonic() > until:
                return
            verdict = copies.judge(mutant, limit_s)
            verdicts[str(mutant)] = verdict
            print(f"{verdict.outcome:9}{verdict.seconds:6.0f} s  {mutant}", flush=True)
            with kept.open("a", encoding="utf-8") as file:  # a line each: jobs end at any moment
                file.write(json.dumps(asdict(verdict)) + "\n")

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(judge, mutants))
    return [verdicts[str(mutant)] for mutant in mutants if str(mutant) in verdicts]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    print(f"{asked.package}: {asked.count} mutants of seed {asked.seed}", flush=True)
    until = time.monotonic() + asked.seconds
    mutants = drawn(asked.package, asked.count, asked.seed)
    kept = KEPT / f"{asked.package}-{asked.seed}-{source_digest(asked.package)}.jsonl"
    verdicts = judged(asked.package, mutants, kept, asked.jobs, until)
    survivors = [verdict for verdict in verdicts if verdict.outcome == "survived"]
    noticed = len(verdicts) - len(survivors)
    print(f"{asked.package}: {noticed} of {len(verdicts)} noticed, of {len(mutants)} drawn")
    for verdict in survivors:
        print(f"  {verdict.mutant}")


if __name__ == "__main__":
    main()
