# SPDX-License-Identifier: Apache-2.0
"""The `inputs` of ``backward(inputs=...)`` and ``torch.autograd.grad``, before the engine has them.

No hook of torch's tells of a backward none of whose inputs is in the graph: the engine runs nothing
then. Both functions hand their inputs to ``torch.autograd._engine_run_backward``, which torch's own
tracing replaces in the same way. Torch 2.12 and 2.13.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_autograd: Any = torch.autograd
_PLACE_OF_INPUTS: Final = 3
"""Among the arguments behind the outputs: gradients, retain_graph, create_graph, inputs, ..."""


class ChooseInputs(Protocol):
    """What chooses the inputs that the engine gets."""

    def __call__(
        self, outputs: Sequence[Any], inputs: Sequence[Any], *, accumulates: bool
    ) -> Sequence[Any]:
        """The inputs to take.

        Args:
            outputs: tensors, or edges of a graph.
            inputs: as they were given, at least one.
            accumulates: whether ``backward`` was called, which adds to ``.grad``.
        """


class _Replaced:
    """Torch's function, around which those that choose are asked."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self.theirs = theirs
        self.choosing: list[ChooseInputs] = []

    def __call__(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if len(args) > _PLACE_OF_INPUTS and args[_PLACE_OF_INPUTS]:
            inputs, accumulates = args[_PLACE_OF_INPUTS], kwargs.get("accumulate_grad", True)
            for choose in self.choosing:
                inputs = tuple(choose(outputs, inputs, accumulates=accumulates))
            args = (*args[:_PLACE_OF_INPUTS], inputs, *args[_PLACE_OF_INPUTS + 1 :])
        return self.theirs(outputs, *args, **kwargs)


_lock = threading.Lock()


@contextmanager
def choose_inputs(choose: ChooseInputs) -> Iterator[None]:
    """Inside, `choose` is asked before each backward of this process that is given inputs."""
    with _lock:
        replaced = _autograd._engine_run_backward
        if not isinstance(replaced, _Replaced):
            replaced = _autograd._engine_run_backward = _Replaced(replaced)
        replaced.choosing.append(choose)
    try:
        yield
    finally:
        with _lock:
            replaced.choosing.remove(choose)
            # Someone else may have replaced it since: then ours stays, and asks nobody.
            if not replaced.choosing and _autograd._engine_run_backward is replaced:
                _autograd._engine_run_backward = replaced.theirs
