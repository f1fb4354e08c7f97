# SPDX-License-Identifier: Apache-2.0
"""`NoDropoutMode`: a dispatch mode in which dropout drops nothing, wherever it is called.

A comparison of a split batch with the whole one runs in it: dropout draws other numbers on every
rank, which is no error, and the differences would hide one.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import TorchDispatchMode, arguments_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_aten: Final = torch.ops.aten


class NoDropoutMode(TorchDispatchMode):
    """Inside, dropout keeps every element, wherever it is called.

    Many models apply dropout without a layer for it: attention hands a probability to
    ``scaled_dot_product_attention``, or calls ``functional.dropout`` with the ``training`` of a
    parent. So the mode changes the operators that draw the random numbers; layers that drop paths
    with ``bernoulli_`` of floating point numbers keep everything, too. Forward and backward both
    have to run inside.

    Attributes:
        was_needed: an operator that ran inside would have dropped elements.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.was_needed = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is _aten.bernoulli_.float and args[0].is_floating_point():
            # A layer divides the kept elements by the probability to keep them, the mask's mean. A
            # mask of bools or integers has no mean: it stays drawn.
            self.was_needed = True
            probability = args[1] if len(args) > 1 else given.get("p", 0.5)
            return args[0].fill_(probability)
        found = _neutral_argument(func)
        if found is not None:
            place, name, neutral = found
            if place < len(args):
                self.was_needed |= args[place] != neutral
                args = (*args[:place], neutral, *args[place + 1 :])
            elif name in given:
                self.was_needed |= given[name] != neutral
                given[name] = neutral
        return func(*args, **given)


@cache
def _neutral_argument(func: Any) -> tuple[int, str, float] | None:
    """Place and name of the argument by which an operator drops, and its value to keep all."""
    if func is _aten.native_dropout_backward.default:
        wanted, neutral = "scale", 1.0
    else:
        wanted, neutral = "p" if func is _aten.native_dropout.default else "dropout_p", 0.0
    names = arguments_of(func)
    return (names.index(wanted), wanted, neutral) if wanted in names else None
