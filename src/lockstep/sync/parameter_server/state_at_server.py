# SPDX-License-Identifier: Apache-2.0
"""`StateAtServer`: a worker's stand-in for the state that a parameter server has."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.errors import NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class StateAtServer(defaultdict[Any, Any]):
    """The ``state`` of a served optimizer, which refuses to be taken for an empty one.

    A method of the optimizer that reads it at the worker (schedule-free's ``eval()``), and a loop
    that clears it, would do nothing. Rejected: to fetch it when it is read. What is written to it
    then would be lost.

    Attributes:
        is_there: the server has a state; until then this is an ordinary mapping, which the loop may
            use if it steps by itself (SAM).
    """

    def __init__(self) -> None:
        super().__init__(dict)
        self.is_there = False

    @contextmanager
    def as_empty(self) -> Iterator[None]:
        """Inside, it is an empty mapping, for torch's ``state_dict()`` and its like."""
        before, self.is_there = self.is_there, False
        try:
            yield
        finally:
            self.is_there = before

    def __reduce__(self) -> Any:
        # A copy of the optimizer is no served one.
        with self.as_empty():
            return defaultdict, (dict, dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self.as_empty():
            return copy.deepcopy(defaultdict(dict, self), memo)


def state_error() -> NotAvailableError:
    """The error for a state that is used at a worker as if it were there."""
    return NotAvailableError(
        "the state of this optimizer is at the parameter server",
        got="a program, or a method of the optimizer, that uses `optimizer.state` here",
        cause="steps happen at the server: what is here would look empty, or be lost",
        fix="optimizer.state_dict() fetches a copy, load_state_dict() sends one, and"
        ' load_state_dict({**optimizer.state_dict(), "state": {}}) resets it; or another sync,'
        " where the optimizer's own methods are used between steps",
    )


def _refusing(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def refuse_or_call(self: StateAtServer, *args: Any, **kwargs: Any) -> Any:
        if self.is_there:
            raise state_error()
        return method(self, *args, **kwargs)

    return refuse_or_call


# Everything that reads or writes items.
for _name in (
    *("__contains__", "__copy__", "__delitem__", "__getitem__", "__ior__", "__iter__", "__len__"),
    *("__or__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys"),
    *("pop", "popitem", "setdefault", "update", "values"),
):
    setattr(StateAtServer, _name, _refusing(_name))
