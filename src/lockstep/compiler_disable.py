# SPDX-License-Identifier: Apache-2.0
"""`disable_dynamo`: a typed ``torch.compiler.disable`` that does not import the compiler."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from lockstep._torch_compat import COMPILER, disable_dynamo_at_first_call
from lockstep.lazy_dynamo_import import dynamo_import_hook

if TYPE_CHECKING:
    from collections.abc import Callable

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def disable_dynamo(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A decorator: under ``torch.compile`` the graph breaks before `function`, and goes on after.

    Functions that communicate need it: Python code reads the numbers that ranks exchange, and a
    compiled graph cannot run Python code. ``torch.compiler.disable`` would import the compiler at
    once; this one does so only in processes without `import_compiler_lazily`.
    """
    if dynamo_import_hook.is_on and COMPILER not in sys.modules:

        @functools.wraps(function)
        def plain(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            # Torch sets an attribute on the function, which a bound method does not allow.
            return function(*args, **kwargs)

        disabled_later: Callable[Parameters, Result] = disable_dynamo_at_first_call(plain)
        dynamo_import_hook.add(plain)
        return disabled_later
    disable: Any = torch.compiler.disable
    disabled: Callable[Parameters, Result] = disable(function)
    return disabled
