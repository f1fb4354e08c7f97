# SPDX-License-Identifier: Apache-2.0
"""`ReplacedStep`: replaces the `step` of an optimizer object, which stays the same object.

Loops, schedulers and gradient scalers hold the user's own optimizer, so a sync that steps in
another way (at a parameter server, on this rank's rows alone) cannot hand out another object.
Rejected: a subclass or a wrapper, returned by `register`: a loop that keeps using its own
``self.optimizer`` would step alone, silently.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import AMP_SCALING_ATTR, WAS_STEPPED_ATTR, with_step_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

_ABOUT_STEPPING: Final = frozenset(
    {"step", "state_dict", "load_state_dict", AMP_SCALING_ATTR}
    | {WAS_STEPPED_ATTR, "grad_scale", "found_inf"}
)


class ReplacedStep:
    """The `step` of `optimizer` replaced by another function, until `restore`.

    The optimizer's hooks before and after a step run around it, as they do around its own step.

    Args:
        optimizer: the user's.
        step: gets the arguments of ``optimizer.step``.
        others: further methods to replace, by name.
    """

    def __init__(
        self, optimizer: Optimizer, step: Callable[..., Any], **others: Callable[..., Any]
    ) -> None:
        def replaced(this: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # Schedulers look at it, to warn of steps that were never taken.
            vars(this)[WAS_STEPPED_ATTR] = True
            return step(*args, **kwargs)

        self._attributes = vars(optimizer)
        self._names = ("step", AMP_SCALING_ATTR, *others)
        self._shadowed = {name: own for name, own in vars(optimizer).items() if name in self._names}
        self._attributes.update(others, step=MethodType(with_step_hooks(replaced), optimizer))
        if AMP_SCALING_ATTR in self._attributes:
            # A scaler would leave the unscaling to a kernel that the replaced step never runs.
            self._attributes[AMP_SCALING_ATTR] = False

    def restore(self) -> None:
        """Give the optimizer its own methods back."""
        for name in self._names:
            self._attributes.pop(name, None)
        self._attributes.update(self._shadowed)


def optimizer_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters in all groups of `optimizer`, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors that `optimizer` keeps for each of its parameters (momenta, step counts)."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    values = (value for state in states for value in state.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that only this kind of optimizer has; its copies and pickles lack them."""
    skipped = _attributes_of_every_optimizer() | _ABOUT_STEPPING
    return {name: value for name, value in vars(optimizer).items() if name not in skipped}


@cache
def _attributes_of_every_optimizer() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros((), device="cpu")])))


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step evaluates the loss itself, maybe several times (LBFGS)."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty
