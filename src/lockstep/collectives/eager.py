# SPDX-License-Identifier: Apache-2.0
"""Functions that a compiler leaves out of its graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def outside_graphs(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Under ``torch.compile`` the graph breaks before `function` and goes on after it.

    Python reads what the ranks say to each other, and a graph has no Python in it. The typed
    form of ``torch.compiler.disable``.
    """
    disable: Any = torch.compiler.disable
    return cast("Callable[Parameters, Result]", disable(function))
