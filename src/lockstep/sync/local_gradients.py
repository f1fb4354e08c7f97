# SPDX-License-Identifier: Apache-2.0
"""`LocalGradients`: the gradients of `local` parameters in a window of weighted backwards.

A weighted backward multiplies its loss by weight / unit, and the round divides the gradients that
it reduces. No round has those of local parameters. So each rank divides its own by the weight of
its own window: they are those of the mean over the samples of this rank, as in one process, and
depend on no unit. Rejected: to multiply them back in a hook; a window needs all its weights.
The user's hooks wait for that, as those on synchronised parameters do (see `parameter_hooks`).

On a borrowed batch, whose samples are another rank's, hooks let no backward add to the gradients.
A plain ``loss.backward()`` shows only at its first synchronised gradient, which may come later.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from lockstep.sync.parameter_hooks import ParameterHooks, is_accumulating, run_inside_backward

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.utils.hooks import RemovableHandle


class LocalGradients:
    """The gradients of one rank's local parameters.

    Args:
        parameters: those that lie in the synchronised modules.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._earlier: list[torch.Tensor | None] | None = None
        self._hooks: list[RemovableHandle] = []
        self._before: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None] = {}
        self._hooked: set[int] = set()  # the numbers of parameters with hooks of the user's
        self._closed: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []  # see run_hooks
        self._user_hooks = [self._take_hooks(n) for n in range(len(self._parameters))]

    def _take_hooks(self, number: int) -> ParameterHooks:
        # Torch's reference to the table of hooks that wait is hidden from the garbage collector:
        # nothing that leads from there to the parameter may be strong.
        weak_self, hooked = weakref.ref(self), self._hooked

        def before_accumulation(gradient: torch.Tensor) -> torch.Tensor | None:
            if number not in self._hooked or self._waits(number):
                return None
            return self._user_hooks[number].apply_tensor_hooks(gradient)

        def after_accumulation(parameter: torch.Tensor) -> None:
            alive = weak_self()
            if alive is not None and alive._earlier is None and parameter.requires_grad:
                alive._user_hooks[number].run_post_accumulate_hooks()

        return ParameterHooks(
            self._parameters[number],
            before_accumulation,
            after_accumulation,
            lambda: hooked.add(number),
        )

    def _waits(self, number: int) -> bool:
        """Whether the running backward is one of a window that divides its gradients."""
        return self._earlier is not None and is_accumulating(self._parameters[number])

    def release(self) -> None:
        """Let autograd run the user's hooks again."""
        for hooks in self._user_hooks:
            hooks.release()
        self._user_hooks.clear()

    @property
    def has_any(self) -> bool:
        """Whether a parameter in the synchronised modules is this rank's own."""
        return bool(self._parameters)

    def begin_batch(self, *, is_borrowed: bool) -> None:
        """Let backwards add to the gradients from now on, unless the batch is a borrowed one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._before.clear()
        for parameter in self._parameters if is_borrowed else ():
            flag = parameter.requires_grad
            if not parameter.is_floating_point() and not parameter.is_complex():
                continue
            # torch takes no hook of a frozen parameter, and the batch's loop may unfreeze it.
            parameter.requires_grad_(True)
            self._hooks += [
                parameter.register_hook(partial(self._note, parameter)),
                parameter.register_post_accumulate_grad_hook(self._undo),
            ]
            parameter.requires_grad_(flag)

    def _note(self, parameter: torch.Tensor, _: torch.Tensor) -> None:
        # Autograd runs this hook for `torch.autograd.grad`, too, which changes nothing here.
        grad = parameter.grad
        self._before[parameter] = None if grad is None else (grad, grad.detach().clone())

    @torch.no_grad()
    def _undo(self, parameter: torch.Tensor) -> None:
        before = self._before.pop(parameter)
        parameter.grad = None if before is None else before[0].copy_(before[1])

    def take(self) -> list[torch.Tensor | None]:
        """Take the gradients out of ``parameter.grad``."""
        taken = [parameter.grad for parameter in self._parameters]
        self._set([None] * len(taken))
        return taken

    def put_back(self, taken: list[torch.Tensor | None], *, with_zeros: bool) -> None:
        """Put back what `take` has taken, and drop the gradients of since then.

        Args:
            with_zeros: a parameter that has a gradient since then, and had none, gets zeros.
        """
        since = self.take() if with_zeros else [None] * len(taken)
        self._set(
            torch.zeros_like(new) if old is None and new is not None else old
            for old, new in zip(taken, since, strict=True)
        )

    def open_window(self) -> None:
        """Set the gradients of earlier windows aside."""
        if self._parameters:
            self._closed = []
            self._earlier = self.take()

    @torch.no_grad()
    def close_window(self, weight: float) -> None:
        """Divide the window's gradients by its weight, and add them to those of earlier windows.

        Args:
            weight: in units; 0 if this rank had no samples, and has zeros for gradients.
        """
        earlier, self._earlier = self._earlier, None
        if earlier is None:
            return
        means = [None if grad is None else grad / (weight or 1.0) for grad in self.take()]
        self._closed = list(zip(earlier, means, strict=True))
        self._set(
            new if old is None else old if new is None else old + new for old, new in self._closed
        )

    def run_hooks(self) -> None:
        """Let the gradients of the window that was closed last pass the user's hooks."""
        closed, self._closed = self._closed, []
        waiting = [
            (self._user_hooks[number], old, new)
            for number, (old, new) in enumerate(closed)
            if new is not None and number in self._hooked
        ]

        def run() -> None:
            for hooks, old, new in waiting:
                changed = hooks.apply_tensor_hooks(new)
                if changed is not new:
                    hooks.param.grad = changed if old is None else old + changed
                hooks.run_post_accumulate_hooks()

        if waiting:
            run_inside_backward([hooks.param for hooks, *_ in waiting], run)

    def forget_window(self) -> None:
        """Drop the gradients of an open window, and those that were set aside."""
        if self._earlier is not None:
            self._earlier = None
            self.take()

    def _set(self, gradients: Iterable[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
