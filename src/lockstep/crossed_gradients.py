# SPDX-License-Identifier: Apache-2.0
"""Parameters whose gradients hold what other ranks' losses said, all ranks counting alike.

A backward in which gradients travel between ranks compares the ranks' weights before they do. A
program that weighs the gradients itself afterwards (`average_gradients`) would weigh what has
crossed by the weight of the wrong rank. So the backward notes here which parameters it leads to.
A note holds until its parameter's value changes: an optimizer has used the gradient by then.

It is kept by parameter and not by thread or backward: the program may average another model in
between, or assign gradients that ``torch.autograd.grad`` returned. A reentrant checkpoint hides its
parameters from the graph, and they are not noted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep._torch_compat import version_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_versions: Any = WeakTensorKeyDictionary()
"""The noted parameters, and the version in which each was."""


def note_crossing(node: Any) -> None:
    """Note the parameters to which the gradients lead that `node` of a graph passes on."""
    seen, waiting = {node}, [node]
    while waiting:
        for before, _ in waiting.pop().next_functions:
            if before is None or before in seen:
                continue
            seen.add(before)
            waiting.append(before)
            leaf = getattr(before, "variable", None)  # of the nodes that accumulate gradients
            if isinstance(leaf, torch.Tensor):
                _versions[leaf] = version_of(leaf)


def have_crossed(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the present gradients of some of `parameters` have crossed ranks."""
    return any(_versions.get(each) == version_of(each) for each in parameters)


def forget_crossings(parameters: Iterable[torch.Tensor]) -> None:
    """Forget what was noted of `parameters`: their gradients are the same on every rank now."""
    for each in parameters:
        _versions.pop(each, None)
