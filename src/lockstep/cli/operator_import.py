# SPDX-License-Identifier: Apache-2.0
"""Imports the operator class that a command is given as ``MODULE:OPERATOR``."""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from lockstep.operator import TrainingOperator


def import_operator(name: str, folder: str | None = None) -> type[TrainingOperator]:
    """Import the class, from `folder` (the current one) or from the folder of its file.

    The folder is put on the import path of this process and of the workers that it starts. Other
    machines of a cluster need the code as well: ``ray job submit --working-dir .`` sends it.

    Raises:
        ConfigurationError: the module or class does not exist; the message names those that do.
        Whatever the module raises when it is imported.
    """
    module_name, colon, class_name = name.rpartition(":")
    is_relative = module_name.startswith(".") and not module_name.endswith(".py")
    if not colon or not module_name or not class_name or is_relative:
        raise ConfigurationError(
            "this names no operator",
            expected="MODULE:OPERATOR",
            got=name,
            fix="lockstep train package.module:Digits, or path/to/file.py:Digits",
        )
    module = import_from(module_name, Path(folder or Path.cwd()))
    found = getattr(module, class_name, None)
    if found is None or not _is_operator(found):
        raise _no_such_operator_error(module, module_name, class_name, found)
    operator: type[TrainingOperator] = found
    return operator


def import_from(name: str, folder: Path) -> Any:
    """Import a module, from `folder` or from its file; see `import_operator`."""
    if not name.endswith(".py"):
        return _import_module(name, folder)
    path = Path(name).resolve()
    if not path.is_file():
        raise ConfigurationError("there is no such file", got=str(path))
    imported = _import_module(path.stem, path.parent)
    found = getattr(imported, "__file__", None)
    if found is None or os.path.realpath(found) != str(path):
        raise ConfigurationError(
            "the file is hidden by another module of its name",
            expected=str(path),
            got=found or f"{path.stem}, a part of Python",
            fix="give the file another name, or take the other one's folder off PYTHONPATH",
        )
    return imported


def _import_module(module: str, folder: Path) -> Any:
    _put_on_path(str(folder))
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # Where the user's own module imports a missing one, the traceback says more.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(
            f"there is no module {module}",
            where=f"the folder {folder}, or what is installed",
            fix=f"lockstep train {module.replace('.', '/')}.py:..."
            if Path(f"{module.replace('.', '/')}.py").exists()
            else "run it where the module is, or name the file: path/to/file.py:Operator",
        ) from None
    except ImportError as error:
        # Whatever else a module cannot import, the traceback says more.
        if "relative import" not in str(error):
            raise
        raise ConfigurationError(
            f"{module} can be imported only as a part of its package",
            where=f"the folder {folder}",
            got=str(error),
            fix="name it from the folder above the package: package.module:Operator",
        ) from None


def _put_on_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in before:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, before)])


def _is_operator(found: Any) -> bool:
    from lockstep.operator import TrainingOperator

    is_class = isinstance(found, type) and issubclass(found, TrainingOperator)
    return is_class and found is not TrainingOperator


def _no_such_operator_error(
    module: Any, module_name: str, class_name: str, found: Any
) -> ConfigurationError:
    there = sorted(name for name, each in vars(module).items() if _is_operator(each))
    alike = difflib.get_close_matches(class_name, there, n=1)
    what = "is no TrainingOperator" if found is not None else "is not there"
    return ConfigurationError(
        f"{class_name} {what}",
        where=module_name,
        expected=f"one of {', '.join(there)}" if there else "a subclass of TrainingOperator",
        got=None if found is None else f"{found!r:.80}",
        fix=f"did you mean {module_name}:{alike[0]}?" if alike else None,
    )
