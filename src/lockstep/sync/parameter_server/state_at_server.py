# SPDX-License-Identifier: Apache-2.0
"""`StateAtServer`: a worker's stand-in for the state that a parameter server has."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.errors import NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Iterator


class StateAtServer(defaultdict[Any, Any]):
    """The ``state`` of a served optimizer, which refuses to be taken for an empty one.

    A method of the optimizer that reads it at the worker (schedule-free's ``eval()``) would do
    nothing. Rejected: to fetch it when it is read. What such a method writes would be lost.

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

    def _refuse(self) -> None:
        if self.is_there:
            raise NotAvailableError(
                "the state of this optimizer is at the parameter server",
                got="a program, or a method of the optimizer, that uses `optimizer.state` here",
                cause="steps happen at the server: here the state would look empty",
                fix="optimizer.state_dict() fetches a copy, load_state_dict() sends one; or another"
                " sync, where the optimizer's own methods are used between steps",
            )

    def __getitem__(self, key: Any) -> Any:
        self._refuse()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse()
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        self._refuse()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._refuse()
        return super().__iter__()

    def __len__(self) -> int:
        self._refuse()
        return super().__len__()

    def get(self, key: Any, default: Any = None) -> Any:
        self._refuse()
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._refuse()
        return super().setdefault(key, default)

    def keys(self) -> Any:
        self._refuse()
        return super().keys()

    def values(self) -> Any:
        self._refuse()
        return super().values()

    def items(self) -> Any:
        self._refuse()
        return super().items()

    def __reduce__(self) -> Any:
        # A copy of the optimizer is no served one.
        with self.as_empty():
            return defaultdict, (dict, dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self.as_empty():
            return copy.deepcopy(defaultdict(dict, self), memo)
