# SPDX-License-Identifier: Apache-2.0
"""Puts off the import of torch's compiler, `torch._dynamo`, until a program needs it.

The first optimizer of a process imports `torch._dynamo`, and with it sympy: 820 modules, as long as
torch itself takes (1.0 s of a processor), and 70 MiB. The optimizer asks the compiler for two
things, to stay out of some methods and to break its graph around a step, and both mean nothing in a
process that compiles nothing. In workers these requests are put off until something else imports
the compiler: ``torch.compile``, DDP, or checkpointing of activations. From then on everything is as
torch has it. In a torch that differs here from 2.6 to 2.13 nothing is put off.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

from lockstep._torch_compat import (
    BREAKS_GRAPH,
    COMPILER,
    HAS_ASKED,
    KEEPS_OUT,
    NAMES_IN_BREAKS_GRAPH,
    keep_out_of_graphs,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def outside_graphs(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Under ``torch.compile`` the graph breaks before `function` and goes on after it.

    Python reads what the ranks say to each other, and a graph has no Python in it. The typed form
    of ``torch.compiler.disable``, which imports the compiler where that is not put off.
    """
    if _put_off.is_on and COMPILER not in sys.modules:

        @functools.wraps(function)
        def plain(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            # Torch sets an attribute on the function; a bound method takes none.
            return function(*args, **kwargs)

        kept_out: Callable[Parameters, Result] = keep_out_of_graphs(plain)
        _put_off.add(plain)
        return kept_out
    disable: Any = torch.compiler.disable
    disabled: Callable[Parameters, Result] = disable(function)
    return disabled


def import_compiler_lazily() -> None:
    """Let optimizers of this process be made, and step, without the compiler."""
    if COMPILER in sys.modules or _put_off.is_on:
        return
    _put_off.is_on = True
    sys.meta_path.insert(0, _put_off)
    for method in vars(Optimizer).values():
        if _name_of(method) == KEEPS_OUT:
            _put_off.add(method.__wrapped__)
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            step: Any = vars(kind).get("step")
            if _name_of(step) == BREAKS_GRAPH and NAMES_IN_BREAKS_GRAPH.issuperset(
                step.__code__.co_names
            ):
                kind.step = _stepping(step)  # type: ignore[method-assign]


def _is_known(step: Any) -> bool:
    return NAMES_IN_BREAKS_GRAPH.issuperset(step.__code__.co_names)


class _PutOff:
    """An import finder that finds nothing, but notices the import of the compiler.

    Until then its functions pass for functions that the compiler stays out of.

    Attributes:
        is_on: for this process.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._functions: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()

    def add(self, function: Callable[..., Any]) -> None:
        vars(function)[HAS_ASKED] = function
        self._functions.add(function)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """See `sys.meta_path`; called before a module is imported."""
        if name == COMPILER:
            for function in self._functions:
                vars(function).pop(HAS_ASKED, None)
            self._functions.clear()


_put_off: Final = _PutOff()


def _name_of(method: Any) -> str | None:
    code = getattr(method, "__code__", None)
    return None if code is None or not hasattr(method, "__wrapped__") else code.co_qualname


def _stepping(breaking_graph: Any) -> Callable[..., Any]:
    plain = breaking_graph.__wrapped__

    @functools.wraps(plain)
    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # In this order: in a graph the first is a constant, and a table of modules is none.
        if torch.compiler.is_compiling() or COMPILER in sys.modules:
            return breaking_graph(optimizer, *args, **kwargs)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return plain(optimizer, *args, **kwargs)

    return step
