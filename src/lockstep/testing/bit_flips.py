# SPDX-License-Identifier: Apache-2.0
"""Bit flips: lets a rank compute wrong numbers without an error, to test what notices.

::

    from lockstep.testing import Flip, flipped

    Wrong = flipped(Digits, Flip("activation", rank=1, step=40, bit=20))
    with TorchTrainer(training_operator_cls=Wrong, num_workers=3, reproducible=True,
                      shadow_every=1) as trainer:
        trainer.train(num_steps=50)
        print(trainer.status()["shadow"]["wrong"])

A processor may do this without an error: see Hochschild et al., "Cores that don't count" (HotOS
2021), and Dixit et al., "Silent Data Corruptions at Scale" (arXiv 2102.11245).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

import torch

from lockstep.errors import ConfigurationError
from lockstep.testing.fault_injection import call_in_backward, do_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.operator import TrainingOperator

Place = Literal["weight", "activation", "gradient", "message", "optimizer"]

_PLACES: Final = get_args(Place)
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Flip:
    """A bit that has the wrong value on one rank.

    Attributes:
        place: what the bit is in: a "weight" (before a forward), an "activation" (the output of a
            layer), a "gradient" (of a parameter, as backward computes it), a "message" (a gradient
            as this rank gets it from the reduction), or the state of an "optimizer" (before a
            step).
        rank: the rank that computes it.
        step: the global batch in which it happens, counted from 0 over the whole run.
        position: of the number: 0 is the first one of the first tensor, and towards 1 come the last
            ones of the last tensor.
        bit: of the number, from 0, the lowest one of its fraction.
        nth: of the shards that the rank computes in the step, counted from 0.
        is_permanent: the process that has the rank in that step computes wrong bits from then on,
            in each step and for each shard; one that takes its place does not.

    Raises:
        ConfigurationError: the place is unknown, or the position no number from 0 to below 1.
    """

    place: Place
    rank: int
    step: int
    position: float = 0.0
    bit: int = 0
    nth: int = 0
    is_permanent: bool = False

    def __post_init__(self) -> None:
        if self.place not in _PLACES or not 0 <= self.position < 1:
            raise ConfigurationError(
                "no bit flips there",
                expected=f"one of {', '.join(_PLACES)}, at a position from 0 to below 1",
                got=f"{self.place!r} at {self.position!r}",
            )


def flipped(operator_cls: type[TrainingOperator], *flips: Flip) -> type[TrainingOperator]:
    """A subclass of `operator_cls` whose workers compute wrong bits by `flips`.

    They are in its first model and its first optimizer.
    """

    class Flipped(operator_cls):  # type: ignore[valid-type,misc]
        def setup(self, config: Any) -> None:
            cast("Any", super()).setup(config)
            self._flipper = _Flipper(self, flips)

    Flipped.__name__, Flipped.__qualname__ = operator_cls.__name__, operator_cls.__qualname__
    return Flipped


class _Hook:
    """A hook that pickles as `do_nothing`: a copy of the model elsewhere flips no bit."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> Any:
        return partial, (do_nothing,)


class _Flipper:
    """The hooks on one operator's model and optimizer that flip bits."""

    def __init__(self, operator: Any, flips: Sequence[Flip]) -> None:
        self._state = operator._lockstep
        self._operator = operator
        self._flips = flips
        self._step = self._nth = -1
        self._broken: set[Flip] = set()
        run = self._state.registered
        model, optimizer = run.models[0], run.optimizers[0]
        self._params = [each for each in model.parameters() if each.requires_grad]
        model.register_forward_pre_hook(_Hook(self._before_forward))
        layers = [each for each in model.modules() if not [*each.children()]]
        for number, layer in enumerate(layers):
            layer.register_forward_hook(_Hook(self._flip_output(number, len(layers))))
        # A node of autograd lives as long as somebody holds it.
        self._nodes = [
            call_in_backward(param, self._flip_gradient(number))
            for number, param in enumerate(self._params)
        ]
        hooks: Any = optimizer
        hooks.register_step_pre_hook(self._before_step)

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if not module.training:
            return
        step = self._state.committed
        self._nth = self._nth + 1 if step == self._step else 0
        self._step = step
        self._broken |= {
            flip
            for flip in self._flips
            if (flip.rank, flip.step) == (self._operator.world_rank, step)
        }
        for flip in self._due("weight"):
            self._flip_one_of([param.data for param in self._params], flip)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for flip in self._due("message", in_any_shard=True):
            gradients = [param.grad for param in self._params if param.grad is not None]
            self._flip_one_of(gradients, flip)
        for flip in self._due("optimizer", in_any_shard=True):
            states = [optimizer.state.get(param, {}) for param in self._params]
            held = [value for each in states for value in each.values()]
            tensors = [each for each in held if isinstance(each, torch.Tensor) and each.ndim]
            self._flip_one_of(tensors, flip)

    def _flip_output(self, number: int, count: int) -> Any:
        def flip_output(layer: torch.nn.Module, _: Any, output: Any) -> None:
            for flip in self._due("activation") if layer.training else ():
                place = flip.position * count
                if int(place) == number:
                    flip_bit(output, place - number, flip.bit)

        return flip_output

    def _flip_gradient(self, number: int) -> Any:
        def flip_gradient(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            for flip in self._due("gradient"):
                place = flip.position * len(self._params)
                if int(place) == number:
                    gradients = tuple(each.clone() for each in gradients)
                    flip_bit(gradients[0], place - number, flip.bit)
            return gradients

        return flip_gradient

    def _flip_one_of(self, tensors: Sequence[torch.Tensor], flip: Flip) -> None:
        if tensors:
            place = flip.position * len(tensors)
            flip_bit(tensors[int(place)], place - int(place), flip.bit)

    def _due(self, place: Place, *, in_any_shard: bool = False) -> list[Flip]:
        step, nth = self._state.committed, self._nth
        return [
            flip
            for flip in self._flips
            if flip.place == place
            and flip in self._broken
            and (flip.is_permanent or (step == flip.step and (in_any_shard or nth == flip.nth)))
        ]


def flip_bit(tensor: torch.Tensor, position: float, bit: int) -> None:
    """Flip a bit of one number of `tensor`, in place; autograd does not notice.

    Args:
        position: of the number: from 0, the first one, to below 1.
        bit: from 0, the lowest one.
    """
    numbers = tensor.data  # has a version counter of its own
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    integers = numbers.view(_INTEGERS[numbers.element_size()])
    bits = 8 * numbers.element_size()
    index = int(position * integers.numel())
    place: list[int] = []
    for size in reversed(integers.shape):
        index, rest = divmod(index, size)
        place.insert(0, rest)
    # The highest bit is the sign of the integer, too.
    mask = (1 << bit % bits) - ((1 << bits) if bit % bits == bits - 1 else 0)
    integers[tuple(place)] ^= mask
