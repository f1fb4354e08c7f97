# SPDX-License-Identifier: Apache-2.0
"""Dropout and batch statistics, turned off while a split batch is compared with a whole one.

Dropout draws other numbers on every rank, and batch statistics are those of the rank's own rows:
neither is an error, and the differences that they make would hide one.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from lockstep._torch_compat import BatchNorm, Dropout, TorchDispatchMode, arguments_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_aten: Final = torch.ops.aten


def pin(model: nn.Module) -> list[str]:
    """Turn off, for good, what layers compute from part of a batch otherwise than from the whole.

    A later ``model.train()``, which every training loop calls, changes nothing about it.

    Returns:
        What was turned off, one sentence for each layer.
    """
    notes: list[str] = []
    for name, module in model.named_modules():
        place = f"layer `{name}`" if name else "the model"
        if isinstance(module, Dropout):
            _stay_in_evaluation(module)
            notes.append(f"dropout is off in {place}")
        elif normalises_by_batch(module) and module.running_mean is not None:
            _stay_in_evaluation(module)
            notes.append(f"{place} uses its running statistics, not the batch's")
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout:
            # Not `eval`: cuDNN refuses to run the backward of an RNN that is not training.
            module.dropout = 0.0
            notes.append(f"dropout is off in {place}")
    return notes


def normalises_by_batch(module: nn.Module) -> bool:
    """Whether a layer takes its statistics from the rows of this rank alone."""
    return isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def _stay_in_evaluation(module: nn.Module) -> None:
    module.eval()
    module.train = MethodType(lambda self, mode=True: self, module)  # type: ignore[method-assign]


class DropoutOff(TorchDispatchMode):
    """Inside, dropout keeps everything, wherever it is called.

    Many models know no layer of it: attention hands a probability to
    ``scaled_dot_product_attention``, or calls ``functional.dropout`` with the ``training`` of a
    parent. So it is turned off where it is computed, in the operators that draw for it: that
    also turns off layers that drop paths with ``bernoulli_`` of floating point numbers. Forward
    and backward both have to run inside.

    Attributes:
        was_needed: an operator would have dropped something.
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
    """Which argument of an operator makes it drop, and the value with which it keeps all."""
    if func is _aten.native_dropout_backward.default:
        wanted, neutral = "scale", 1.0
    else:
        wanted, neutral = "p" if func is _aten.native_dropout.default else "dropout_p", 0.0
    names = arguments_of(func)
    return (names.index(wanted), wanted, neutral) if wanted in names else None
