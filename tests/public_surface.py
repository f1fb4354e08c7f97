# SPDX-License-Identifier: Apache-2.0
"""The public surface: what users hold on to, as the code says it, in one dictionary.

``python -m tests.public_surface`` writes it to ``tests/public_surface.json``, and prints what has
changed. `tests/test_public_surface.py` compares the two; docs/versions.md says what they promise.

Public are the names in `lockstep.__all__`, in the ``__all__`` of each package of which the
reference (docs/api) shows something, and those that the reference shows besides. The reference
also says what of a name is public: the constructor of a class (but after ``Class()``), the members
that it lists, and the attributes that the docstring lists. Of a name in an ``__all__`` that the
reference does not show only the name itself is public. An entry with ``"..."`` says so.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "public_surface.json"
REFERENCE = ROOT / "docs" / "api"

Entry = list[str | int]
Surface = dict[str, dict[str, Entry]]
"""By section and name: what it is. Entries are lists, whose items a difference is told by."""

OWN_SECTION = {"lockstep.errors", "lockstep.keys"}
"""Modules that the reference shows whole, and that have a section here."""

SHOWN_ELSEWHERE = "lockstep.operator.operator_factories."
"""Class methods of `TrainingOperator`, which are here with its other members."""

DIRECTIVE = re.compile(
    r"^\.\. auto(?P<kind>class|function|module):: (?P<name>[\w.]+)(?P<bare>\(\))?\n"
    r"(?P<options>(?:   :.*\n)*)",
    re.MULTILINE,
)
ATTRIBUTES = re.compile(r"^Attributes:\n(?P<body>(?:(?: {4}.*)?\n?)*)", re.MULTILINE)
ATTRIBUTE = re.compile(r"^ {4}(?P<names>\w+(?:, \w+)*): ", re.MULTILINE)

DEPRECATED = "deprecated: "
REMOVAL = re.compile(r"lockstep (?P<version>\d+\.\d+) removes it; use .+")

PROTOCOLS = {"__enter__": "with", "__iter__": "for", "__len__": "len", "__call__": "call"}


# -------------------------------------------------------------------------------- the names


@dataclass(frozen=True)
class Shown:
    """What the reference shows of a class or a function.

    Attributes:
        has_constructor: with its arguments.
        members: those of a class; None: all that are public.
    """

    has_constructor: bool
    members: frozenset[str] | None


def reference(folder: Path = REFERENCE) -> dict[str, Shown]:
    """By dotted name what the pages of the reference show, without whole modules."""
    shown = {}
    for page in sorted(folder.glob("*.md")):
        for match in DIRECTIVE.finditer(page.read_text(encoding="utf-8")):
            if match["kind"] == "module":
                assert match["name"] in OWN_SECTION, f"no section for {match['name']}"
                continue
            lists = re.search(r"^   :members:(.*)$", match["options"], re.MULTILINE)
            members = frozenset(re.findall(r"\w+", lists[1])) if lists else frozenset()
            is_everything = lists is not None and not members
            shown[match["name"]] = Shown(not match["bare"], None if is_everything else members)
    return shown


def packages(shown: Mapping[str, Shown]) -> list[str]:
    """The modules with an ``__all__`` of which the reference shows something."""
    homes = {name.rpartition(".")[0] for name in shown}
    return sorted(home for home in homes if "__all__" in vars(import_module(home)))


def names(shown: Mapping[str, Shown]) -> dict[str, Entry]:
    """The public functions and classes, and the members of these."""
    found: dict[str, Entry] = {}
    homes: dict[int, str] = {}
    for name, how in shown.items():
        if not name.startswith(SHOWN_ELSEWHERE):
            value = _resolve(name)
            homes[id(value)] = name
            found |= _described(name, value, how)
    for package in packages(shown):
        module = import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if f"{package}.{name}" not in found:
                same = homes.get(id(value))
                entry = [f"is {same}"] if same else [_kind(value), "..."]
                found[f"{package}.{name}"] = entry
    return found


def _resolve(name: str) -> Any:
    home, _, last = name.rpartition(".")
    return getattr(import_module(home), last)


def _kind(value: Any) -> str:
    if inspect.isclass(value):
        return "class"
    return "function" if callable(value) and not hasattr(value, "__origin__") else "value"


def _described(name: str, value: Any, how: Shown) -> dict[str, Entry]:
    if not inspect.isclass(value):
        return {name: ["function", *parameters(value), *deprecation(value)]}
    own = _attributes(value)
    protocols = [word for dunder, word in PROTOCOLS.items() if dunder in own]
    arguments = parameters(value) if how.has_constructor else ["..."]
    kind = " ".join(["class", *protocols])
    found: dict[str, Entry] = {name: [kind, *arguments, *deprecation(value)]}
    listed = how.members
    public = {member for member in own if not member.startswith("_")}
    for member in sorted(public if listed is None else listed):
        found[f"{name}.{member}"] = [*_member(own[member]), *deprecation(own[member])]
    given = set(inspect.signature(value).parameters) if is_dataclass(value) else set()
    for attribute in documented_attributes(value):
        if attribute not in given:
            found.setdefault(f"{name}.{attribute}", ["attribute", *_default(own, attribute)])
    return found


def _attributes(cls: type) -> dict[str, Any]:
    """What lockstep's own classes among `cls` and its bases define; `cls` overrides."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] == "lockstep":
            found |= vars(base)
    return found


def _default(own: Mapping[str, Any], name: str) -> list[str]:
    has_value = name in own and not inspect.isdatadescriptor(own[name])
    return [f"={text_of(own[name])}"] if has_value else []


def _member(value: Any) -> Entry:
    if isinstance(value, property):
        return ["property" if value.fset is None else "property, can be set"]
    if isinstance(value, classmethod | staticmethod):
        given = parameters(value.__func__)
        after = _after_self(given) if isinstance(value, classmethod) else given
        return [type(value).__name__, *after]
    if inspect.isfunction(value):
        return ["method", *_after_self(parameters(value))]
    return ["attribute", f"={text_of(value)}"]


def _after_self(given: list[str]) -> list[str]:
    return given[2:] if given[1:2] == ["/"] else given[1:]


def documented_attributes(cls: type) -> list[str]:
    """The names under "Attributes:" in the docstring of a class."""
    section = ATTRIBUTES.search(inspect.cleandoc(cls.__doc__ or ""))
    listed = ATTRIBUTE.findall(section["body"]) if section else []
    return [name for entry in listed for name in entry.split(", ")]


def parameters(function: Any) -> list[str]:
    """Names, kinds and defaults, as Python writes them, without annotations."""
    kinds = inspect.Parameter
    found: list[str] = []
    before: Any = None
    for each in inspect.signature(function).parameters.values():
        if before is kinds.POSITIONAL_ONLY and each.kind is not before:
            found.append("/")
        is_marked = before in {kinds.VAR_POSITIONAL, kinds.KEYWORD_ONLY}
        if each.kind is kinds.KEYWORD_ONLY and not is_marked:
            found.append("*")
        stars = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = "" if each.default is kinds.empty else f"={text_of(each.default)}"
        found.append(f"{stars}{each.name}{default}")
        before = each.kind
    return [*found, "/"] if before is kinds.POSITIONAL_ONLY else found


def deprecation(value: Any) -> list[str]:
    """What ``@deprecated`` (PEP 702) says of a function, a class or a member."""
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    message = getattr(function, "__dict__", {}).get("__deprecated__")
    return [] if message is None else [f"{DEPRECATED}{message}"]


def wrong_deprecations(found: Surface, version: str, changelog: str) -> list[str]:
    """What deprecated names do not say, and those that `version` should be without."""
    now = tuple(map(int, version.split(".")[:2]))
    listed = "".join(re.findall(r"^### Deprecated\n(.*?)(?=^##|\Z)", changelog, re.M | re.S))
    wrong = []
    for section in found.values():
        for name, entry in section.items():
            message = str(entry[-1]) if entry else ""
            if not message.startswith(DEPRECATED):
                continue
            says = REMOVAL.fullmatch(message.removeprefix(DEPRECATED))
            if says is None:
                wrong.append(f"{name} has to say `lockstep X.Y removes it; use ...`")
            elif tuple(map(int, says["version"].split("."))) <= now:
                wrong.append(f"{name} is still in {version}")
            if f"`{name}`" not in listed:
                wrong.append(f"{name} is not under Deprecated in CHANGELOG.md")
    return wrong


def text_of(value: Any) -> str:
    """A value as it is written: the same text in each process, without addresses and hashes."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, tuple):
        return "(" + ", ".join(map(text_of, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(text_of, value)) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(text_of, value))) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{text_of(k)}: {text_of(v)}" for k, v in value.items()) + "}"
    if type(value).__module__ == "dataclasses":
        return repr(value)  # "<factory>"
    return getattr(value, "__qualname__", f"<{type(value).__name__}>")


def constants(module: ModuleType) -> dict[str, Entry]:
    """The constants of a module, with their values."""
    written = {name: value for name, value in vars(module).items() if re.match(r"[A-Z]", name)}
    return {name: [text_of(value)] for name, value in written.items() if name.isupper()}


def errors(module: ModuleType) -> dict[str, Entry]:
    """The exceptions and warnings: their code, bases, attributes, and the root's constructor."""
    found: dict[str, Entry] = {}
    for name, value in vars(module).items():
        if inspect.isclass(value) and issubclass(value, Exception) and name[0] != "_":
            bases = ", ".join(base.__name__ for base in value.__bases__)
            attributes = [f".{each}" for each in documented_attributes(value)]
            found[name] = [value.code, f"({bases})", *attributes]
    return found | {"LockstepError(...)": parameters(module.LockstepError)}


# ------------------------------------------------------------------ commands and what they write


def command_line(parser: argparse.ArgumentParser, words: str) -> dict[str, Entry]:
    """Each command's arguments in their order, and its options."""
    found: dict[str, Entry] = {}
    place = 0
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                found[f"{words} {word}"] = ["command"]
                found |= command_line(command, f"{words} {word}")
        elif isinstance(action, argparse._HelpAction):
            continue
        elif action.option_strings:
            found[f"{words} {', '.join(action.option_strings)}"] = _option(action)
        else:
            place += 1
            found[f"{words} {place}: {action.metavar or action.dest}"] = _option(action)
    return found


def _option(action: argparse.Action) -> Entry:
    said = []
    if action.option_strings and action.metavar:
        said.append(f"metavar {action.metavar}")
    if action.nargs is not None:
        said.append("takes no value" if action.nargs == 0 else f"nargs {action.nargs}")
    if action.choices is not None:
        said.append("one of " + " ".join(map(str, action.choices)))
    if action.default is not None and action.default != argparse.SUPPRESS:
        said.append(f"default {text_of(action.default)}")
    if action.required and action.option_strings:
        said.append("required")
    if isinstance(action, argparse._AppendAction):
        said.append("several times")
    return said


def exit_codes() -> dict[str, Entry]:
    """How the commands end, beside 0; the names are lockstep's own."""
    from lockstep.audit import exit_codes as of_audit
    from lockstep.cli import exit_codes as of_others

    commands = {"audit": of_audit, "train, replay, bisect": of_others}
    return {
        f"{command}: {value}": [name]
        for command, module in commands.items()
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int)
    }


def rules() -> dict[str, Entry]:
    """The codes of the audit, with name and severity."""
    from lockstep.audit.rules import all_codes

    return {code: [each.name, each.severity] for code, each in all_codes().items()}


def audit_json() -> dict[str, Entry]:
    """The keys and types of what ``lockstep audit --json`` writes, of a run and of none."""
    from lockstep.audit.finding import SEVERITIES, Finding, Place
    from lockstep.audit.options import Options
    from lockstep.audit.outcome import report, write_nothing_found

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/report.json"
        asked = Options("train.py", ["--lr"], only=("LS1",), ignore=("LS101",), json=path)
        report(asked, [None, None], 2, quiet=True)
        of_a_run = json.loads(Path(path).read_text(encoding="utf-8"))
        write_nothing_found({"json": path}, 2)
        of_none = json.loads(Path(path).read_text(encoding="utf-8"))
    # Null where the package is not installed.
    of_none |= {"lockstep": None, "torch": None}
    finding = Finding("LS101", "", "error", "", "", where=[Place("train.py", 1, "", "")]).as_dict()
    of_a_run |= {"lockstep": "0.1", "torch": "2.13", "findings": [finding]}
    of_a_run |= {"unseen": ["an error"], "failed_rules": ["LS101"]}
    found: dict[str, Entry] = {}
    for key in of_a_run.keys() | of_none.keys():
        files = (of_a_run, of_none)
        types = {_type_in_json(file[key]) if key in file else "not there" for file in files}
        if any(name.startswith("list of") for name in types):
            types.discard("list")  # an empty one
        found[key] = [" or ".join(sorted(types, key=lambda name: (name == "null", name)))]
    for prefix, keys, cls in (
        ("findings[].", finding, Finding),
        ("findings[].where[].", finding["where"][0], Place),
    ):
        found |= {f"{prefix}{key}": [_type_in_words(cls.__annotations__[key])] for key in keys}
    return found | {"findings[].severity": list(SEVERITIES)}


def _type_in_json(value: Any) -> str:
    if isinstance(value, list):
        kinds = {_type_in_json(each) for each in value}
        return f"list of {' or '.join(sorted(kinds))}" if kinds else "list"
    names_of = {dict: "object", type(None): "null"}
    return names_of.get(type(value), type(value).__name__)


def _type_in_words(annotation: str) -> str:
    text = re.sub(r"list\[(\w+)\]", r"list of \1", annotation.replace(" | None", " or null"))
    return "object" if text.startswith("dict") else text


def formats() -> dict[str, Entry]:
    """The version that is written of each format that outlives the program."""
    from lockstep.checkpoint import dcp_directory, file_format
    from lockstep.data import shard_loader
    from lockstep.trainer import run_log

    position = import_module(shard_loader.__module__)
    return {
        "checkpoint": [file_format.VERSION],
        "checkpoint directory: the file that says so": [dcp_directory.INDEX],
        "run.jsonl": [run_log.FORMAT],
        "shard_loader(...).state_dict()": [position._STATE_VERSION],
    }


def surface() -> Surface:
    """The public surface as the code has it now."""
    from lockstep import cli

    sections = {
        "names": names(reference()),
        "lockstep.keys": constants(import_module("lockstep.keys")),
        "lockstep.errors": errors(import_module("lockstep.errors")),
        "rules of the audit": rules(),
        "exit codes": exit_codes(),
        "command line": command_line(cli.make_parser(), "lockstep"),
        "JSON of the audit": audit_json(),
        "formats": formats(),
    }
    return {section: dict(sorted(entries.items())) for section, entries in sections.items()}


# -------------------------------------------------------------------------- compare and write


def differences(was: Surface, now: Surface) -> list[str]:
    """What was added, removed and changed, a line each, in this order."""
    old, new = dict(_flat(was)), dict(_flat(now))
    added = [f"added    {name}: {_line(new[name])}" for name in new if name not in old]
    removed = [f"removed  {name}: {_line(old[name])}" for name in old if name not in new]
    changed = [
        f"changed  {name}: {_change(old[name], new[name])}"
        for name in new
        if name in old and old[name] != new[name]
    ]
    return [*added, *removed, *changed]


def _flat(of: Surface) -> Iterator[tuple[str, Entry]]:
    for section, entries in of.items():
        for name, entry in entries.items():
            yield f"{section}: {name}", entry


def _line(entry: Entry) -> str:
    return ", ".join(map(str, entry))


def _change(old: Entry, new: Entry) -> str:
    gone = [item for item in old if item not in new]
    come = [item for item in new if item not in old]
    if not gone and not come:
        return f"{_line(old)} -> {_line(new)}"
    return f"{_line(gone) or 'nothing'} -> {_line(come) or 'nothing'}"


def as_json(of: Surface) -> str:
    """One entry a line; a long one with an item a line, so that a difference shows the item."""
    sections = []
    for section, entries in of.items():
        lines = []
        for name, entry in entries.items():
            items = [json.dumps(item, ensure_ascii=False) for item in entry]
            line = f"    {json.dumps(name)}: [{', '.join(items)}]"
            if len(line) > 99:
                line = f"    {json.dumps(name)}: [\n      " + ",\n      ".join(items) + "\n    ]"
            lines.append(line)
        sections.append(f"  {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def read(path: Path = FILE) -> Surface:
    """What was accepted last."""
    of: Surface = json.loads(path.read_text(encoding="utf-8"))
    return of


def main() -> None:
    """Write the file, and print what has changed."""
    was = read() if FILE.exists() else {}
    now = surface()
    FILE.write_text(as_json(now), encoding="utf-8")
    print("\n".join(differences(was, now)) or "nothing has changed")


if __name__ == "__main__":
    main()
