# SPDX-License-Identifier: Apache-2.0
"""`OptimizerStepPatch`: replaces the `step` of an optimizer object, which stays the same object.

Loops, schedulers and gradient scalers hold the user's own optimizer, so a sync that steps in
another way (at a parameter server, on this rank's rows alone) cannot hand out another object.
Rejected: a subclass or a wrapper, returned by `register`: a loop that keeps using its own
``self.optimizer`` would step alone, silently. `OptimizerMethodPatch` leaves `step` as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

from lockstep._torch_compat import AMP_SCALING_ATTR, WAS_STEPPED_ATTR, with_step_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim import Optimizer


class OptimizerMethodPatch:
    """Attributes of the object `optimizer` replaced by others, until `restore`.

    Where two patches replace the same ones, the later one has to be restored first.
    """

    def __init__(self, optimizer: Optimizer, **replacements: Any) -> None:
        self._attributes = vars(optimizer)
        self._names = tuple(replacements)
        self._shadowed = {n: own for n, own in self._attributes.items() if n in replacements}
        self._attributes.update(replacements)

    def restore(self) -> None:
        """Give the optimizer its own attributes back."""
        for name in self._names:
            self._attributes.pop(name, None)
        self._attributes.update(self._shadowed)


class _Load(Protocol):
    def __call__(self, state: Mapping[str, Any], *, of_same_weights: bool) -> None: ...


@dataclass(frozen=True)
class LoadElsewhere:
    """The ``load_state_dict`` of an optimizer whose state another process holds.

    Attributes:
        load: takes the arguments of `lockstep.sync.optimizer_inspection.load_state`.
    """

    load: _Load

    def __call__(self, state_dict: Mapping[str, Any]) -> None:
        """Load as torch does, which rounds to the dtypes of the parameters."""
        self.load(state_dict, of_same_weights=False)


class OptimizerStepPatch(OptimizerMethodPatch):
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

        # A scaler would leave the unscaling to a kernel that the replaced step never runs.
        scaling = {AMP_SCALING_ATTR: False} if AMP_SCALING_ATTR in vars(optimizer) else {}
        own_step = MethodType(with_step_hooks(replaced), optimizer)
        super().__init__(optimizer, **others, **scaling, step=own_step)
