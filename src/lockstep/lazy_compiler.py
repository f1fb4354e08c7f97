# SPDX-License-Identifier: Apache-2.0
"""torch's compiler: imported by who compiles, and kept out of what it should not look into.

The first optimizer of a process imports `torch._dynamo`, and with it sympy: 820 modules, as long as
torch itself takes (1.0 s of a processor), and 70 MiB. It asks the compiler for two things, to stay
out of some methods and to break its graph around a step, and both mean nothing in a process that
compiles nothing. In the processes of workers they are put off until somebody has imported it.
Where a torch is made in another way (this was written for 2.6 to 2.13) nothing is found to put off,
and it is imported as ever.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_COMPILER: Final = "torch._dynamo"
_KEEPS_OUT: Final = "_disable_dynamo.<locals>.inner"
"""Of torch/_compile.py: imports the compiler to ask for a function that it does not look into."""
_HAS_ASKED: Final = "__dynamo_disable"
"""Where that function is kept then."""
_BREAKS_GRAPH: Final = "_use_grad_for_differentiable.<locals>._use_grad"
"""Of torch/optim/optimizer.py: the step of torch's own optimizers."""


def outside_graphs(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Under ``torch.compile`` the graph breaks before `function` and goes on after it.

    Python reads what the ranks say to each other, and a graph has no Python in it. The typed
    form of ``torch.compiler.disable``, which imports the compiler; this one waits for it.
    """
    disabled: Callable[Parameters, Result] | None = None

    @functools.wraps(function)
    def kept_out(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        nonlocal disabled
        if _COMPILER not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disable: Any = torch.compiler.disable
            disabled = cast("Callable[Parameters, Result]", disable(function))
        return disabled(*args, **kwargs)

    return kept_out


def import_compiler_lazily() -> None:
    """Let optimizers of this process be made, and step, without the compiler."""
    if _COMPILER in sys.modules:
        return
    for method in vars(Optimizer).values():
        if _name_of(method) == _KEEPS_OUT:
            _put_off_asking(method)
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            step = vars(kind).get("step")
            if _name_of(step) == _BREAKS_GRAPH:
                kind.step = _stepping(step)  # type: ignore[method-assign]


def _name_of(method: Any) -> str | None:
    code = getattr(method, "__code__", None)
    return None if code is None or not hasattr(method, "__wrapped__") else code.co_qualname


def _put_off_asking(method: Any) -> None:
    plain = method.__wrapped__

    def until_it_is_there(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return plain(*args, **kwargs)
        vars(plain).pop(_HAS_ASKED, None)
        return method(*args, **kwargs)

    vars(plain)[_HAS_ASKED] = until_it_is_there


def _stepping(breaking_graph: Any) -> Callable[..., Any]:
    plain = breaking_graph.__wrapped__

    @functools.wraps(breaking_graph)
    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _COMPILER in sys.modules:
            return breaking_graph(optimizer, *args, **kwargs)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return plain(optimizer, *args, **kwargs)

    return step
