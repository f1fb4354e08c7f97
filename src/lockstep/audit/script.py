# SPDX-License-Identifier: Apache-2.0
"""Run somebody's script as Python would: as ``__main__``, with its arguments and its folder.

The differences that would show are taken care of: ``sys.argv``, ``sys.path[0]``, ``__file__``,
the module that multiprocessing imports again in a spawned child, and the traceback of a failure,
which begins in the script and not in the audit.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import traceback
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from runpy import _get_module_details  # type: ignore[attr-defined]
from typing import TYPE_CHECKING

from lockstep.audit.facts import Failure
from lockstep.audit.finding import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HERE = os.path.dirname(os.path.abspath(__file__))

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run_script(
    script: str,
    arguments: Sequence[str],
    note_failure: Callable[[BaseException, list[Place]], None],
    show: Callable[[BaseException], None] | None = None,
    *,
    launched: bool = False,
) -> int:
    """Run it to its end.

    Args:
        script: path of a Python file.
        arguments: what follows it in ``sys.argv``.
        note_failure: called with what the script raised and the lines that it passed.
        show: prints an uncaught exception; by default as Python does.
        launched: the interpreter was started so that it looks for nothing where it stands.

    Returns:
        The exit code that Python would end with.
    """
    path = Path(script).resolve()
    _look_in(str(path.parent), launched=launched)
    full = os.path.abspath(script)  # what Python says of its main program, too
    main = _main_module(full, __loader__=SourceFileLoader("__main__", full))

    def run() -> None:
        with io.open_code(str(path)) as file:
            code = compile(file.read(), full, "exec", dont_inherit=True)
        exec(code, vars(main))

    sys.argv = [script, *arguments]
    return _outcome(run, note_failure, show or _show)


def run_module(
    name: str,
    arguments: Sequence[str],
    note_failure: Callable[[BaseException, list[Place]], None],
    *,
    launched: bool = False,
) -> int:
    """The same with what ``python -m name`` would run; a package's ``__main__``."""
    _look_in(os.getcwd(), launched=launched)

    def run() -> None:
        # Python's own way: so it finds the same module, and says the same where there is none.
        _, spec, code = _get_module_details(name, _NotFoundError)
        main = _main_module(
            str(spec.origin),
            __loader__=spec.loader,
            __spec__=spec,
            __package__=spec.parent,
            __cached__=spec.cached,
        )
        sys.argv[0] = str(spec.origin)
        exec(code, vars(main))

    sys.argv = ["-m", *arguments]  # so it is while the packages around it are imported
    return _outcome(run, note_failure, _show)


class _NotFoundError(Exception):
    """There is no such module, in a sentence; what a package raises by itself is the program's."""


def _look_in(folder: str, *, launched: bool) -> None:
    """The first place where modules are looked for."""
    if launched and not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder)
    elif not sys.flags.safe_path:
        sys.path[0] = folder


def _main_module(file: str, **attributes: object) -> types.ModuleType:
    module = types.ModuleType("__main__")
    given = {"__file__": file, "__builtins__": builtins, "__cached__": None, **attributes}
    vars(module).update(given)
    sys.modules["__main__"] = module
    return module


def _outcome(
    run: Callable[[], None],
    note_failure: Callable[[BaseException, list[Place]], None],
    show: Callable[[BaseException], None],
) -> int:
    """The exit code that Python would end with."""
    try:
        run()
    except SystemExit as leaving:
        return _exit_code(leaving)
    except _NotFoundError as error:
        print(f"{sys.executable}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except BaseException as error:
        _drop_our_frames(error)
        note_failure(error, lines_of(error))
        show(error)
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
    return 0


def _exit_code(leaving: SystemExit) -> int:
    code = leaving.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return EXIT_FAILED


def _drop_our_frames(error: BaseException) -> None:
    """The traceback begins in the program, and ours are left out further in, too."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _without_ours(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def _without_ours(first: types.TracebackType | None) -> types.TracebackType | None:
    kept = []
    walked = first
    while walked is not None:
        if not walked.tb_frame.f_code.co_filename.startswith(_HERE):
            kept.append(walked)
        walked = walked.tb_next
    following: types.TracebackType | None = None
    for entry in reversed(kept):
        entry.tb_next = following
        following = entry
    return following


def _show(error: BaseException) -> None:
    """Through the hook, which the script may have replaced."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        traceback.print_exception(error)
    sys.stderr.flush()


def lines_of(error: BaseException) -> list[Place]:
    """Where an exception passed through the program, innermost first."""
    places = [
        Place(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not frame.filename.startswith((_HERE, "<frozen "))
    ]
    own = [p for p in places if "site-packages" not in p.file]
    return (own or places)[:6]


def describe_failure(error: BaseException) -> Failure:
    """Its type and its message, cut to a readable length."""
    return Failure(type(error).__name__, str(error)[:2000])
