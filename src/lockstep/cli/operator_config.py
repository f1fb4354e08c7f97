# SPDX-License-Identifier: Apache-2.0
"""Reads the operator's config from a file and from ``--set KEY=VALUE``."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigurationError
from lockstep.keys import BATCH_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_WORDS: Final[dict[str, Any]] = {"True": True, "False": False, "None": None}

# PyYAML reads YAML 1.1, in which 1e-3 is a string: a number with an exponent needs a dot there.
_EXPONENT: Final = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")

# JSON, unlike YAML, has no numbers that begin with a dot or a plus, or end with a dot.
_WHOLE: Final = re.compile(r"\+(0|[1-9][0-9]*)")
_DECIMAL: Final = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


def load_config(
    file: str | None, settings: Iterable[str], batch_size: int | None = None
) -> dict[str, Any]:
    """Load the file's mapping, and set the ``KEY=VALUE`` entries in it.

    Raises:
        ConfigurationError: the file does not exist or holds no mapping; an entry has another form.
        NotAvailableError: the file is .yaml, and PyYAML is not installed.
    """
    config = {} if file is None else _read_file(Path(file))
    for entry in settings:
        _set_entry(config, entry)
    if batch_size is not None:
        config[BATCH_SIZE] = batch_size
    return config


def _read_file(path: Path) -> dict[str, Any]:
    readers: dict[str, Callable[[str], Any]] = {
        ".yaml": _parse_yaml,
        ".yml": _parse_yaml,
        ".json": json.loads,
        ".toml": tomllib.loads,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigurationError(
            "the config file is of no known kind",
            expected="a name that ends with .yaml, .yml, .json or .toml",
            got=str(path),
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            "the config file is not text in UTF-8", where=str(path), got=str(error)
        ) from error
    except OSError as error:
        raise ConfigurationError(
            "the config file cannot be read", where=str(path), got=error.strerror
        ) from error
    try:
        config = reader(text)
    except ValueError as error:
        raise ConfigurationError(
            f"the config file is not {path.suffix[1:].upper()}",
            where=str(path),
            got=" ".join(str(error).split()),
        ) from error
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise ConfigurationError(
            "the config file holds no mapping",
            where=str(path),
            expected="names with values, such as lr: 0.1",
            got=f"{type(config).__name__}: {config!r:.60}",
        )
    return config


def _parse_yaml(text: str) -> Any:
    from lockstep.integrations.optional_packages import import_optional

    yaml = import_optional("yaml", extra="cli", by="a .yaml config")

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]  # imported when needed
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _set_entry(config: dict[str, Any], entry: str) -> None:
    key, equals, text = entry.partition("=")
    *outer, last = key.split(".")
    if not equals or not all([*outer, last]):
        raise ConfigurationError(
            "--set was given something else than KEY=VALUE", got=entry, fix="--set lr=0.1"
        )
    for name in outer:
        inner = config.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(
                f"--set {entry}: {name} is no mapping", got=f"{name}={inner!r:.60}"
            )
        config = inner
    config[last] = parse_value(text)


def parse_value(text: str) -> Any:
    """The value of `text` in JSON (a list, true, null), a number, or Python's True; else `text`."""
    try:
        return json.loads(text)
    except ValueError:
        if _WHOLE.fullmatch(text):
            return int(text)
        return float(text) if _DECIMAL.fullmatch(text) else _WORDS.get(text, text)
