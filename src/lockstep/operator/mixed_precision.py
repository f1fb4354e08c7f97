# SPDX-License-Identifier: Apache-2.0
"""Mixed precision of the default loop: autocast and loss scaling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from lockstep.phases import Phase, in_phase
from lockstep.sync.optimizer_inspection import optimizer_parameters

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

PrecisionName = Literal["fp32", "bf16", "fp16"]

_AUTOCAST_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast and loss scaling under one name: ``"fp32"``, ``"bf16"`` or ``"fp16"``.

    The scaler looks at the gradients after their reduction, so that every rank finds the
    same infinities and skips, or takes, the same steps.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.name = name
        self._device_type = device.type
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        if self._scaler is not None:
            # The first use makes the scale, and in its first step a rank may have no loss to scale.
            self._scaler.scale(torch.zeros((), device=device))

    def autocast(self, *, keeps_casts: bool = True) -> AbstractContextManager[Any]:
        """The context in which the loss is computed.

        Args:
            keeps_casts: whether forwards in it share the casts of the weights. Where an optimizer
                steps in between, the later ones would compute with the weights of before.
        """
        dtype = _AUTOCAST_DTYPES.get(self.name)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=dtype, cache_enabled=keeps_casts)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss`, multiplied so that its backward does not underflow."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    @in_phase(Phase.OPTIMIZER)
    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[torch.nn.Parameter],
        clip_grad_norm: float | None,
    ) -> None:
        """Unscale, clip to a global norm, and step, in this order; call it after the reduction.

        The step is skipped if a gradient that it uses, or that the norm is of, has overflowed.
        """
        self.unscale(optimizer)
        if clip_grad_norm is not None:
            parameters = list(parameters)
            has_others = self._unscale_others(parameters, optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
            if self._scaler is not None and has_others and not norm.isfinite():
                self._scaler.update()
                return
        self.step_or_skip(optimizer)

    def _unscale_others(
        self, parameters: Iterable[torch.nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> bool:
        """Unscale gradients that `optimizer` does not hold; whether there are such gradients."""
        if self._scaler is None:
            return False
        held = set(map(id, optimizer_parameters(optimizer)))
        others = [each for each in parameters if each.grad is not None and id(each) not in held]
        if not others:
            return False
        # A scaler unscales what an optimizer holds, and lowers the scale for infinities in it.
        self._scaler.unscale_(torch.optim.SGD(others))
        return True

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale of the loss."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step_or_skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with the gradients as they are; skip the step if one of them overflowed."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    def forget_unscaled(self, *holders: object) -> None:
        """Let this scaler, and those that `holders` hold, forget that gradients were unscaled.

        After a step that was interrupted. A scaler that remembers having unscaled its gradients
        would refuse to do so once more, or would take the next ones, scaled as they are, for
        unscaled ones. Where the step counts nevertheless, it does not count for the scale's growth.

        Args:
            holders: have scalers as attributes, or in lists, tuples and dicts.
        """
        values = (value for each in holders for value in vars(each).values())
        for scaler in (self._scaler, *chain.from_iterable(map(members_of, values))):
            if isinstance(scaler, torch.amp.GradScaler):
                # One that has never scaled has nothing to forget, and raises AssertionError.
                with suppress(AssertionError):
                    scaler.update(scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def members_of(value: Any) -> Iterable[Any]:
    """What a list, a tuple or a mapping holds; of anything else, itself."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]
