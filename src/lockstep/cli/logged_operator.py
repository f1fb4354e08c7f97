# SPDX-License-Identifier: Apache-2.0
"""Imports the operator and the hook that a run's log names, without training once more."""

from __future__ import annotations

import inspect
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lockstep.cli.operator_import import import_from, import_operator
from lockstep.errors import ConfigurationError
from lockstep.trainer import TorchTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lockstep.operator import TrainingOperator

_NAME_IT: Final = "--operator path/to/file.py:Operator"
_TRAINS: Final = "the run's program trains as soon as it is imported"


def import_logged_operator(
    program: Mapping[str, Any], run: str, given: str | None
) -> type[TrainingOperator]:
    """Import the operator of a run.

    Args:
        program: what the run's program has told of itself, in the log.
        run: the run's `checkpoint_dir`.
        given: the operator as the user names it; None: as the log does.

    Raises:
        ConfigurationError: the log names none, or it cannot be imported, or to import it would be
            to train once more.
    """
    with _no_trainer_is_made():
        if given is not None:
            return import_operator(given)
        if program["operator"] is not None:
            return _import_logged(program["operator"], program["folder"])
    raise ConfigurationError(
        "the log cannot say which operator the run trained",
        where=run,
        got=program["unnamed"],
        fix=_NAME_IT,
    )


def _import_logged(name: str, folder: str) -> type[TrainingOperator]:
    try:
        operator_cls = import_operator(name, folder)
    except ConfigurationError as error:
        if error.what == _TRAINS:
            raise
        raise ConfigurationError(
            "the operator that the log names cannot be imported any more",
            where=folder,
            expected=name,
            got=error.what,
            fix=_NAME_IT,
        ) from error
    _refuse_hidden(inspect.getfile(operator_cls), name, folder)
    return operator_cls


def import_logged_hook(program: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Import the `initialization_hook` of a run.

    Returns:
        None if there was none; or if it cannot be imported, which the verdict of a replay says.
    """
    if "hook_folder" not in program:
        return None
    name, folder = program["hook"], program["hook_folder"]
    module, _, function = name.rpartition(":")
    # Whatever the user's own module raises: the operator may be in another one.
    with suppress(Exception), _no_trainer_is_made():
        imported = import_from(module, Path(folder))
        _refuse_hidden(imported.__file__, name, folder)
        hook: Callable[[], Any] = getattr(imported, function)
        return hook
    return None


def _refuse_hidden(file: str, name: str, folder: str) -> None:
    home = os.path.realpath(folder)
    if os.path.commonpath([home, os.path.realpath(file)]) != home:
        raise ConfigurationError(
            "the operator that the log names is hidden by another module of its name",
            expected=f"{name} of {folder}",
            got=file,
            fix=_NAME_IT,
        )


@contextmanager
def _no_trainer_is_made() -> Iterator[None]:
    """Refuse trainers while the run's program is imported: it would train once more.

    Raises:
        ConfigurationError: the program makes a trainer outside of its main block.
    """
    initialize = TorchTrainer.__init__

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigurationError(
            _TRAINS,
            fix='move what makes and calls the trainer below `if __name__ == "__main__":`',
        )

    TorchTrainer.__init__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchTrainer.__init__ = initialize  # type: ignore[method-assign]
