# SPDX-License-Identifier: Apache-2.0
"""`OptimizerStepPatch`: replaces the `step` of an optimizer object, which stays the same object.

Loops, schedulers and gradient scalers hold the user's own optimizer, so a sync that steps in
another way (at a parameter server, on this rank's rows alone) cannot hand out another object.
Rejected: a subclass or a wrapper, returned by `register`: a loop that keeps using its own
``self.optimizer`` would step alone, silently.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from lockstep._torch_compat import AMP_SCALING_ATTR, WAS_STEPPED_ATTR, with_step_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


class OptimizerStepPatch:
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
