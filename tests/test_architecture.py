# SPDX-License-Identifier: Apache-2.0
"""The ways in docs/architecture.md are those of the source: a renamed function ends the build.

The page says how to read its lists; `problems` holds the lists to that.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "lockstep"
PAGE = ROOT / "docs" / "architecture.md"

LIMITS = {
    "num_steps": 5,
    "a batch": 7,
    'a gradient under sync="replicate"': 8,
    'a gradient under sync="ddp"': 8,
}
"""The most files that a way leads through. The other ways have no limit."""

WAYS = {*LIMITS, "a remote call", "a metric", "a failure", "a checkpoint"}
WAYS |= {"a part of a checkpoint", "a checkpoint back"}

VERIFY = {"worker.parity_trial.verify", "trainer.verification.verify_steps"}
"""`TorchTrainer.verify` hands its own `num_steps` to these, and not to a loop."""

CALLS = {
    "by a `for` loop",
    "by a remote call",
    "by a remote call's answer",
    "by DDP's communication hook",
    "by an optimizer's step hook",
}
"""Where torch, Ray or Python's own protocols stand between two functions of a way."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef

SECTION = re.compile(r"^## The way of (?P<name>.+)\n(?P<body>(?:(?!^## ).*\n?)*)", re.MULTILINE)
ITEM = re.compile(
    r"^(?P<number>\d+)\. `(?P<name>[\w.]+)`(?: \((?P<mark>.+?)\))?: (?P<text>\S.*)$", re.MULTILINE
)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
REFERENCE = re.compile(
    r"(?P<kind>called by|given by|the caller of) (?:(?P<number>\d+)|`(?P<name>[\w.]+)`)"
)


@dataclass(frozen=True)
class Found:
    """A function or class of lockstep, and the file that it stands in."""

    path: Path
    node: Definition

    def mentions(self, other: str) -> bool:
        """The source calls the function with the dotted name `other`, or passes it on."""
        return other.rpartition(".")[2] in _mentioned(self.node)


def find(name: str) -> Found | None:
    """What `name` (dotted, from below `lockstep` on) is, if it is there."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        stem = SOURCE.joinpath(*parts[:end])
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                node = _inside(_tree(path), parts[end:])
                return None if node is None else Found(path, node)
    return None


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _inside(scope: ast.Module | Definition, names: list[str]) -> Definition | None:
    if not names:
        return None if isinstance(scope, ast.Module) else scope
    for node in scope.body:
        if isinstance(node, Definition) and node.name == names[0]:
            return _inside(node, names[1:])
    return None


def _mentioned(definition: Definition) -> set[str]:
    """Names that the code reads; not its own variables, annotations and decorators."""
    local, read = set(), set()
    waiting: list[ast.AST] = list(definition.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function):
            local |= {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            waiting += node.body
            continue
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else local).add(node.id)
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.AnnAssign):
            children = iter([each for each in (node.target, node.value) if each is not None])
        waiting += children
    if isinstance(definition, Function):
        local |= {each.arg for each in ast.walk(definition.args) if isinstance(each, ast.arg)}
    attributes = {
        node.attr
        for statement in definition.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    return attributes | (read - local)


def is_remote(found: Found) -> bool:
    """The driver may call the function on workers."""
    decorators = [ast.unparse(each).split("(")[0] for each in found.node.decorator_list]
    return "remote_method" in decorators


# ------------------------------------------------------------------------------- the page


@dataclass(frozen=True)
class Item:
    """One line of a way: a function, and how the way came to it."""

    name: str
    mark: str | None
    found: Found


def ways(text: str) -> dict[str, str]:
    """The body of each section about a way, by the name of the way."""
    return {match["name"]: _unwrapped(match["body"]) for match in SECTION.finditer(text)}


def _unwrapped(body: str) -> str:
    return re.sub(r"\n {2,}(?=\S)", " ", body)


def items(body: str) -> Iterator[Item | str]:
    """The items of a way; instead of one that is wrong, what is wrong with it."""
    numbered = [line for line in body.splitlines() if re.match(r"\d+\.", line)]
    for place, line in enumerate(numbered, start=1):
        match = ITEM.match(line)
        if match is None:
            yield f"not `NUMBER. `name` (mark): text`: {line}"
            continue
        found = find(match["name"])
        if found is None:
            yield f"there is no `{match['name']}`"
        elif int(match["number"]) != place:
            yield f"item {place} has the number {match['number']}"
        else:
            yield Item(match["name"], match["mark"], found)


def problems(text: str) -> list[str]:
    """What is wrong with the ways on a page."""
    said = []
    for way, body in ways(text).items():
        listed = list(items(body))
        wrong = [each for each in listed if isinstance(each, str)]
        good = [each for each in listed if isinstance(each, Item)]
        said += [f"{way}: {each}" for each in wrong]
        if not wrong:
            said += [f"{way}: {each}" for each in _broken_links(good)]
            files = {each.found.path for each in good}
            if len(files) > LIMITS.get(way, len(files)):
                said.append(f"{way}: {len(files)} files, and not {LIMITS[way]}")
    return said


def _broken_links(way: list[Item]) -> Iterator[str]:
    for place in range(1, len(way)):
        before, item = way[place - 1], way[place]
        if not _is_linked(way[:place], before, item):
            how = "does not mention" if item.mark is None else f"({item.mark}) does not lead to"
            yield f"`{before.name}` {how} `{item.name}`"


def _is_linked(earlier: list[Item], before: Item, item: Item) -> bool:
    if item.mark is None:
        return before.found.mentions(item.name)
    match = REFERENCE.fullmatch(item.mark)
    if match is None:
        return item.mark in CALLS and _fits(item.mark, before, item)
    if match["number"] is None:
        other = find(match["name"])
        return match["kind"] != "the caller of" and other is not None and other.mentions(item.name)
    if not 1 <= int(match["number"]) <= len(earlier):
        return False
    said = earlier[int(match["number"]) - 1]
    if match["kind"] == "the caller of":
        return item.found.mentions(said.name)
    return said.found.mentions(item.name)


def _fits(mark: str, before: Item, item: Item) -> bool:
    if mark == "by a `for` loop":
        has_loop = any(isinstance(node, ast.For) for node in ast.walk(before.found.node))
        return has_loop and item.name.endswith(".__next__")
    if mark == "by a remote call":
        return is_remote(item.found)
    return mark != "by a remote call's answer" or is_remote(before.found)


# ---------------------------------------------------------------------------------- tests


def test_every_way_leads_from_function_to_function() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert set(ways(text)) == WAYS
    assert {
        way: len(list(items(body))) for way, body in ways(text).items() if len(body) < 300
    } == {}
    assert problems(text) == []


def test_every_kind_of_call_is_used() -> None:
    bodies = ways(PAGE.read_text(encoding="utf-8")).values()
    marks = {each.mark for body in bodies for each in items(body) if isinstance(each, Item)}
    assert {mark for mark in marks if mark and not REFERENCE.fullmatch(mark)} == CALLS


def test_every_name_and_path_on_the_page_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    packages = {path.stem for path in SOURCE.iterdir()}
    codes = set(CODE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)))
    names = {code for code in codes if re.fullmatch(r"\w+(\.\w+)+", code)}
    names = {name for name in names if name.split(".")[0] in packages and name[-3:] != ".py"}
    paths = {code for code in codes if re.fullmatch(r"[\w./-]+(/|\.\w{2,4})", code) and "/" in code}
    assert len(names) > 60
    assert len(paths) > 10
    assert [name for name in names if find(name) is None] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_num_steps_is_known_to_the_files_of_its_way_alone() -> None:
    text = PAGE.read_text(encoding="utf-8")
    way = [each for each in items(ways(text)["num_steps"]) if isinstance(each, Item)]
    files = [each.found.path for each in way]
    entered = [path for place, path in enumerate(files) if place == 0 or files[place - 1] != path]
    assert len(entered) == len(set(entered)), "a file of the way is entered twice"
    assert [name for name in VERIFY if f"`{name}`" not in text] == []
    of_verify = {found.path for name in VERIFY if (found := find(name)) is not None}
    packages = ("trainer", "engine", "recovery", "worker", "operator")
    sources = [path for package in packages for path in (SOURCE / package).rglob("*.py")]
    holders = {path for path in sources if _declares(_tree(path), "num_steps")}
    assert holders - {*files} == of_verify


def _declares(tree: ast.Module, name: str) -> bool:
    """A function has a parameter, or a class a field, of this name."""
    for node in ast.walk(tree):
        is_parameter = isinstance(node, ast.arg) and node.arg == name
        is_field = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
        if is_parameter or is_field or _is_attribute_set(node, name):
            return True
    return False


def _is_attribute_set(node: ast.AST, name: str) -> bool:
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and node.attr == name


def test_the_picture_has_the_layers_that_imports_are_held_to() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = settings["tool"]["importlinter"]["contracts"][0]
    layers = [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]
    picture = re.search(r"^```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert picture is not None
    drawn = [re.split(r" {2,}", line)[0].split(" | ") for line in picture[1].splitlines() if line]
    beside = set(contract["exhaustive_ignores"])
    names = [name for line in drawn for name in line if name not in beside]
    assert sorted(names) == sorted(set().union(*layers))
    heights = [next(n for n, layer in enumerate(layers) if name in layer) for name in names]
    assert heights == sorted(heights)
    assert beside <= {name for line in drawn for name in line}


def test_a_way_that_leads_nowhere_is_found() -> None:
    page = (
        "## The way of a thing\n\nWords.\n\n"
        "1. `trainer.loop_calls.run_loop`: asks the workers\n"
        "   in two lines.\n"
        "2. `trainer.worker_calls.WorkerCalls.call`: one call at a time.\n"
        "3. `worker.worker.Worker.train` (by a remote call): on each worker.\n"
    )
    assert problems(page) == []
    renamed = page.replace("WorkerCalls.call`", "WorkerCalls.invoke`")
    assert problems(renamed) == ["a thing: there is no `trainer.worker_calls.WorkerCalls.invoke`"]
    skipped = page.replace("WorkerCalls.call`", "WorkerCalls.call_rank_0`")
    assert "does not mention" in problems(skipped)[0]
    by_magic = page.replace("by a remote call", "by magic")
    assert "(by magic) does not lead to" in problems(by_magic)[0]
    not_remote = page.replace("Worker.train`", "Worker.leave`")
    assert "(by a remote call) does not lead to" in problems(not_remote)[0]
    backwards = page.replace("by a remote call", "the caller of 2")
    assert "(the caller of 2) does not lead to" in problems(backwards)[0]


def test_more_files_than_its_limit_are_found() -> None:
    page = (
        "## The way of num_steps\n\n"
        "1. `checkpoint.open_checkpoint`: reads.\n"
        "2. `checkpoint.file_format.read_file`: one file.\n"
    )
    assert problems(page) == []
    longer = [
        "`trainer.state_transfer.StateTransfer.read`",
        "`trainer.checkpoint_directory.CheckpointDirectory.read`",
        "`checkpoint.open_checkpoint`",
        "`checkpoint.file_format.read_file`",
        "`checkpoint.file_format.write` (called by `trainer.snapshot_files.write_snapshot`)",
        "`checkpoint.plain_values.plain_state`",
        "`checkpoint.atomic_write.publish` (called by 5)",
    ]
    lines = [f"{number}. {name}: text." for number, name in enumerate(longer, start=1)]
    page = "## The way of num_steps\n\n" + "\n".join(lines) + "\n"
    assert problems(page) == ["num_steps: 6 files, and not 5"]
