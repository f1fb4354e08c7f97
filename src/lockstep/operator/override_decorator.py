# SPDX-License-Identifier: Apache-2.0
"""`override`: a decorator that refuses a method which overrides none of the class it names."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

_Method = TypeVar("_Method")


def override(cls: type) -> Callable[[_Method], _Method]:
    """Refuse, where a class is defined, a method that `cls` has not; as RaySGD's decorator.

    ::

        class Digits(TrainingOperator):
            @override(TrainingOperator)
            def train_batch(self, batch, batch_info): ...

    Raises:
        ConfigurationError: `cls` has no method of this name.
    """

    def checked(method: _Method) -> _Method:
        name = getattr(method, "__name__", repr(method))
        if not hasattr(cls, name):
            raise ConfigurationError(
                f"{name} overrides nothing: {cls.__name__} has no method of this name",
                fix="spell it as there, or leave the decorator out",
            )
        return method

    return checked
