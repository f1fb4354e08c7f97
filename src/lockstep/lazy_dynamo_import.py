# SPDX-License-Identifier: Apache-2.0
"""Delays the import of torch's compiler, `torch._dynamo`, until a program needs it.

The first optimizer of a process imports `torch._dynamo`, and with it sympy: 820 modules, as long as
torch itself takes (1.0 s of a processor), and 70 MiB. The optimizer asks the compiler for two
things, to stay out of some methods and to break its graph around a step, and both mean nothing in a
process that compiles nothing. In workers these requests wait until something else imports the
compiler: ``torch.compile``, DDP, or checkpointing of activations. From then on everything is as
torch has it. In a version of torch that differs here from 2.6 to 2.13 nothing is delayed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim import Optimizer

from lockstep._torch_compat import (
    COMPILER,
    DISABLE_DYNAMO_WRAPPER,
    DYNAMO_DISABLE_CACHE_ATTR,
    NAMES_IN_USE_GRAD_WRAPPER,
    USE_GRAD_WRAPPER,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def import_compiler_lazily() -> None:
    """Let this process make optimizers, and step with them, without importing the compiler."""
    if COMPILER in sys.modules or dynamo_import_hook.is_on:
        return
    dynamo_import_hook.is_on = True
    sys.meta_path.insert(0, dynamo_import_hook)
    for method in vars(Optimizer).values():
        if _wrapper_qualname(method) == DISABLE_DYNAMO_WRAPPER:
            dynamo_import_hook.add(method.__wrapped__)
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            step: Any = vars(kind).get("step")
            if _wrapper_qualname(step) == USE_GRAD_WRAPPER and NAMES_IN_USE_GRAD_WRAPPER.issuperset(
                step.__code__.co_names
            ):
                kind.step = _without_graph_break(step)  # type: ignore[method-assign]


class _DynamoImportHook:
    """An import finder that finds no module, but notices the import of the compiler.

    Until that import, each function given to `add` carries itself as the cached result of
    `torch._dynamo.disable(function)`, so that torch does not import the compiler to compute it.

    Attributes:
        is_on: `import_compiler_lazily` was called in this process.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._functions: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()

    def add(self, function: Callable[..., Any]) -> None:
        vars(function)[DYNAMO_DISABLE_CACHE_ATTR] = function
        self._functions.add(function)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """See `sys.meta_path`; Python calls it before it imports the module `name`."""
        if name == COMPILER:
            for function in self._functions:
                vars(function).pop(DYNAMO_DISABLE_CACHE_ATTR, None)
            self._functions.clear()


dynamo_import_hook: Final = _DynamoImportHook()


def _wrapper_qualname(method: Any) -> str | None:
    """The qualified name of the wrapper in `method`; None for a function that wraps no other."""
    code = getattr(method, "__code__", None)
    return None if code is None or not hasattr(method, "__wrapped__") else code.co_qualname


def _without_graph_break(wrapped_step: Any) -> Callable[..., Any]:
    """An optimizer's `step` that calls torch's wrapper only once the compiler is imported."""
    plain = wrapped_step.__wrapped__

    @functools.wraps(plain)
    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # `is_compiling()` first: dynamo folds it to a constant, and cannot trace `in sys.modules`.
        if torch.compiler.is_compiling() or COMPILER in sys.modules:
            return wrapped_step(optimizer, *args, **kwargs)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return plain(optimizer, *args, **kwargs)

    return step
