# SPDX-License-Identifier: Apache-2.0
"""The house rules that lint cannot hold: sizes, names, imports, no mocks, no paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import lockstep

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "lockstep"
UNIT = ROOT / "tests" / "unit"
"""Its folders are those of the source: whoever changes a module finds its tests there."""

PUBLIC_NAMES = [
    "Callback",
    "GradientSync",
    "LockstepError",
    "TorchTrainer",
    "TrainingOperator",
    "average_gradients",
    "gather",
    "global_mean",
    "info_nce",
    "local",
    "nt_xent",
    "prestart",
    "rank_slice",
    "replicate",
    "shard_loader",
]
"""What `import lockstep` offers. Users hold on to it: adding a name is a decision."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
FIRST_LINE = "# SPDX-License-Identifier: Apache-2.0"
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|manager|helpers?|misc)($|_)")

PRIVATE_NAMES_OF_OURS = {"successor._parameters"}
"""Where an object of lockstep has an attribute that is called as a private one of torch's."""

PYTHON_FOLDERS = ("src", "tests", "examples", "benchmarks", "docs")
WITHOUT_MOCKS = ("ranks", "procs", "ray", "faults", "soak")
"""Tests of communication: a mock there proves that the mock works."""

# Written so that this file does not hold what it forbids.
CONFLICT_MARKS = ("<" * 7 + " ", ">" * 7 + " ")
MACHINE_PATHS = re.compile(r"(?<![\w.-])/(work|home|root|Users)/[A-Za-z]|\b[A-Z]:\\Users")


def _tracked_or_new_files() -> list[Path]:
    """What a commit of the working tree would hold; the ignored (.venv, caches) is left out."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0:
        names = listing.stdout.decode().split("\0")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    # An unpacked archive has no history and no ignored files either, but may have a .venv.
    return [p for p in ROOT.rglob("*") if p.is_file() and ".venv" not in p.parts]


FILES = _tracked_or_new_files()
PYTHON_FILES = [
    p for p in FILES if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in PYTHON_FOLDERS
]
SOURCE_FILES = [p for p in PYTHON_FILES if p.is_relative_to(SOURCE)]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=_name(path))


def _lines_of_text(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:  # a picture
        return []


def _imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside a function, with its parents."""
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_rules_see_the_source() -> None:
    """Rules over an empty list hold always; this one says that the list is not empty."""
    assert SOURCE / "errors.py" in SOURCE_FILES
    assert Path(__file__).resolve() in PYTHON_FILES


def test_public_names_are_sorted_and_frozen() -> None:
    assert lockstep.__all__ == PUBLIC_NAMES
    assert lockstep.__all__ == sorted(lockstep.__all__)
    assert [name for name in lockstep.__all__ if not hasattr(lockstep, name)] == []


def test_every_file_starts_with_its_licence() -> None:
    without = [_name(p) for p in PYTHON_FILES if not p.read_text().startswith(FIRST_LINE + "\n")]
    assert without == []


def test_every_module_says_what_it_is_for() -> None:
    without = [_name(p) for p in PYTHON_FILES if ast.get_docstring(_tree(p)) is None]
    assert without == []


def test_no_file_is_too_long() -> None:
    lengths = {_name(p): len(p.read_text().splitlines()) for p in PYTHON_FILES}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    too_long = {}
    for path in PYTHON_FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long[f"{_name(path)}:{node.name}"] = length
    assert too_long == {}


def test_no_module_has_a_name_that_says_nothing() -> None:
    parts = {part for p in SOURCE_FILES for part in p.relative_to(SOURCE).with_suffix("").parts}
    assert {part for part in parts if FORBIDDEN_NAMES.search(part)} == set()


def _replaces_code(tree: ast.Module) -> bool:
    """Whether pytest's own monkeypatch is used to replace code; `setenv` and `chdir` do not."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"monkeypatch", "mocker"}
        and node.attr in {"setattr", "setitem", "delattr", "patch"}
        for node in ast.walk(tree)
    )


UNIT_TESTS = [p for p in PYTHON_FILES if p.is_relative_to(UNIT) and p.name.startswith("test_")]


def test_each_folder_of_unit_tests_is_a_package_of_the_source() -> None:
    folders = {path.parent.relative_to(UNIT) for path in UNIT_TESTS}
    assert [str(f) for f in folders if not (SOURCE / f / "__init__.py").exists()] == []


def test_each_unit_test_names_the_module_that_it_tests() -> None:
    """For `lockstep.sync.buckets`: ``sync/test_buckets.py``, ``sync/test_buckets_of_a_run.py``, or
    any file of ``sync/`` whose docstring has that name in backticks."""
    modules = {_module(path) for path in SOURCE_FILES}
    nameless = []
    for path in UNIT_TESTS:
        package = ".".join(("lockstep", *path.relative_to(UNIT).parent.parts))
        words = path.stem.split("_")[1:]
        beginnings = {"_".join(words[:end]) for end in range(1, len(words) + 1)}
        docstring = ast.get_docstring(_tree(path)) or ""
        named = set(re.findall(rf"`{re.escape(package)}\.(\w+)", docstring))
        if not modules & {f"{package}.{name}" for name in beginnings | named}:
            nameless.append(_name(path))
    assert nameless == []


def test_no_mock_stands_in_for_communication() -> None:
    offenders = set()
    for path in PYTHON_FILES:
        if path.relative_to(ROOT).parts[:2] not in {("tests", folder) for folder in WITHOUT_MOCKS}:
            continue
        imported = _imported_modules(path)
        if imported & {"mock", "unittest.mock", "pytest_mock"} or _replaces_code(_tree(path)):
            offenders.add(_name(path))
    assert offenders == set()


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _front_doors() -> set[tuple[str, str]]:
    """The imports that may point up: pyproject.toml names them for import-linter, and why."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]
    ways = [way.split(" -> ") for way in layers["ignore_imports"]]
    return {(importer, imported) for importer, imported in ways}


def _import_graph() -> dict[str, dict[str, int]]:
    """For each module of lockstep, the modules that it imports and the line of each import.

    Imports inside functions and under ``TYPE_CHECKING`` count. A name from a package's front
    (``from lockstep.sync import local``) is an import of the package's ``__init__``; a submodule
    (``from lockstep.sync import wire``) is one of the submodule alone.
    """
    modules = {_module(path): path for path in SOURCE_FILES}
    graph: dict[str, dict[str, int]] = {}
    for module, path in modules.items():
        imported = graph[module] = {}
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Import):
                names = [(alias.name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"a relative import at {_name(path)}:{node.lineno}"
                front = node.module or ""
                names = [(f"{front}.{alias.name}", front) for alias in node.names]
            else:
                continue
            for submodule, front in names:
                target = submodule if submodule in modules else front
                if target in modules and target != module:
                    imported.setdefault(target, node.lineno)
    return graph


def _circles(graph: dict[str, dict[str, int]]) -> list[set[str]]:
    """The strongly connected components of more than one module, sorted."""

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()].keys() - found
            found |= new
            waiting += new
        return found

    below = {module: reachable(module) for module in graph}
    circles = {
        frozenset(other for other in below[module] if module in below[other]) for module in graph
    }
    return sorted((set(circle) for circle in circles if circle), key=sorted)


def test_front_doors_are_the_only_imports_that_point_up() -> None:
    doors = _front_doors()
    assert {imported for _, imported in doors} == {
        "lockstep.integrations.lightning",
        "lockstep.integrations.tune",
    }
    assert len(doors) == 2


def test_a_circle_is_found_through_several_modules() -> None:
    graph = {"a": {"b": 1}, "b": {"c": 2}, "c": {"b": 3, "d": 4}, "d": {}}
    assert _circles(graph) == [{"b", "c"}]


def test_no_circle_of_imports() -> None:
    """A reader of one module need not have read another that needs the first.

    Imports inside functions and for types alone are part of a circle, too: only the two front
    doors are left out.
    """
    graph = _import_graph()
    for importer, imported in _front_doors():
        graph[importer].pop(imported, None)
    circles = _circles(graph)
    ways = [
        f"{importer}:{line} -> {imported}"
        for circle in circles
        for importer in sorted(circle)
        for imported, line in graph[importer].items()
        if imported in circle
    ]
    assert not ways, "a circle of imports:\n" + "\n".join(ways)


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _private_touches(tree: ast.Module) -> Iterator[tuple[int, str, ast.expr | None]]:
    """Private names that a module takes from others: line, name, and from what if it says so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part, None) for part in parts if _private(part))
        elif isinstance(node, ast.Attribute) and _private(node.attr):
            if ast.unparse(node.value) not in {"self", "cls"}:
                yield node.lineno, node.attr, node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}:
            name = node.args[1]
            if isinstance(name, ast.Constant) and _private(str(name.value)):
                yield node.lineno, str(name.value), node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            key = str(node.slice.value)
            yield from [(node.lineno, key, node.value)] * _private(key)


def test_one_package_alone_touches_what_is_private_to_torch() -> None:
    """`lockstep._torch_compat` says of each name for which torch it is; so do no other files."""
    compat = sorted((SOURCE / "_torch_compat").glob("*.py"))
    known = {name for path in compat for _, name, _ in _private_touches(_tree(path))}
    known |= {name for name in dir(torch.Tensor) if _private(name)}
    offences = []
    for path in SOURCE_FILES:
        if path in compat or path.is_relative_to(SOURCE / "audit"):
            continue
        for line, name, owner in _private_touches(_tree(path)):
            root = ast.unparse(owner).split(".")[0] if owner else "torch"
            of_ours = f"{root}.{name}" in PRIVATE_NAMES_OF_OURS
            if (name in known or root in {"torch", "dist", "nn"}) and not of_ours:
                offences.append(f"{_name(path)}:{line} {name}")
    assert offences == []


def test_the_driver_holds_no_torch_distributed() -> None:
    """import-linter sees other people's packages as a whole, so this one is held here."""
    drivers = [p for p in SOURCE_FILES if p.relative_to(SOURCE).parts[0].startswith("trainer")]
    imported = {module for path in drivers for module in _imported_modules(path)}
    assert {module for module in imported if module.startswith("torch.distributed")} == set()


def test_importing_lockstep_does_not_import_ray() -> None:
    """A torchrun user has no Ray, and pays nothing for it."""
    program = "import sys, lockstep; print([m for m in sys.modules if m.split('.')[0] == 'ray'])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def _places_where(holds: Callable[[str], object]) -> list[str]:
    return [
        f"{_name(path)}:{number}"
        for path in FILES
        for number, line in enumerate(_lines_of_text(path), start=1)
        if holds(line)
    ]


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    assert _places_where(MACHINE_PATHS.search) == []


def test_no_merge_was_left_half_done() -> None:
    assert _places_where(lambda line: line.startswith(CONFLICT_MARKS)) == []
