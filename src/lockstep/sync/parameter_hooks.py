# SPDX-License-Identifier: Apache-2.0
"""The hooks of one parameter: lockstep's, which autograd runs, and the user's, which run later.

A user's hook on a parameter expects the gradient of the global batch. While backward runs there is
only this rank's share of it, scaled by its weight: a hook that adds, clamps or replaces would
change each rank's share in another way, and a write after its bucket has left races the reduction.
So autograd sees lockstep's hooks alone. The user's hooks run once for each round, on the reduced
gradient, in the order in which autograd would have run them. It does not matter then whether the
user or lockstep registered first.

Rejected: letting buckets leave one gradient later (the user's hooks then still see a share),
applying weights in the bucket where there are hooks (exact for what a hook adds, wrong for a
clamp), and a second backward that brings reduced gradients to their parameters (it would accumulate
them in copies, and torch's DDP would take it for its own).
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import (
    post_accumulate_grad_hooks,
    set_post_accumulate_grad_hooks,
    set_tensor_hooks,
    tensor_hooks,
    will_execute_node,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OURS: Final = -1
"""Torch numbers the hooks of users from 0."""


class _WaitingHooks(OrderedDict[int, Any]):
    """A parameter's table of hooks, of which autograd sees only lockstep's entry.

    Torch reads the table in C, past the methods here, and users write it through them. The table
    stays on the parameter after `release`, because handles that users hold remove from it.

    Args:
        earlier: the table that the parameter had; handles to it stay good.

    Attributes:
        on_user_hook: called when the user registers a hook.
    """

    def __init__(self, earlier: dict[int, Any] | None) -> None:
        super().__init__()
        self.users: dict[int, Any] = OrderedDict() if earlier is None else earlier
        self.on_user_hook: Callable[[], object] | None = None

    def __setitem__(self, key: int, hook: Any) -> None:
        self.users[key] = hook
        if self.on_user_hook is not None:
            self.on_user_hook()

    def __contains__(self, key: object) -> bool:
        return key in self.users

    def __delitem__(self, key: int) -> None:
        del self.users[key]

    def begin(self, on_user_hook: Callable[[], object]) -> None:
        """Hide the user's hooks from autograd from now on."""
        self.on_user_hook = on_user_hook
        if self.users:
            on_user_hook()

    def expose(self, hook: Callable[..., Any]) -> None:
        """Let autograd run `hook` alone."""
        super().__setitem__(_OURS, hook)

    def pass_on(self, run_users: Callable[..., Any]) -> None:
        """Let autograd run `run_users`, as soon as there are hooks of the user's."""
        super().pop(_OURS, None)
        self.on_user_hook = lambda: self.expose(run_users)
        if self.users:
            self.on_user_hook()


def _nothing(_: torch.Tensor) -> None:
    """The hook for autograd where lockstep needs none and the user's hooks run later."""


def _table(found: Any) -> _WaitingHooks:
    return found if isinstance(found, _WaitingHooks) else _WaitingHooks(found)


class ParameterHooks:
    """The hooks that run when a gradient of `param` is computed.

    Args:
        param: the parameter; frozen ones take hooks too, and may be unfrozen later.
        before_accumulation: called with a gradient that autograd has computed, before its use; also
            under ``torch.autograd.grad``, which accumulates nothing. Returns None, or the gradient
            to use instead.
        after_accumulation: called when a gradient was added to ``param.grad``; None: no call.
        on_user_hook: called if the user has registered hooks, or when the user registers one.

    Attributes:
        param: the same.
    """

    def __init__(
        self,
        param: torch.Tensor,
        before_accumulation: Callable[[torch.Tensor], torch.Tensor | None],
        after_accumulation: Callable[[torch.Tensor], None] | None,
        on_user_hook: Callable[[], object],
    ) -> None:
        self.param = param
        self._on_user_hook = on_user_hook
        self._after_accumulation = after_accumulation or _nothing
        self._before = _table(tensor_hooks(param))
        self._before.begin(on_user_hook)
        self._before.expose(before_accumulation)
        # Set the attribute in any case: torch reads the table when the attribute is set.
        set_tensor_hooks(param, self._before)
        self._after: _WaitingHooks | None = None
        if after_accumulation is not None or post_accumulate_grad_hooks(param) is not None:
            self._adopt_post_accumulate_hooks()

    def _adopt_post_accumulate_hooks(self) -> _WaitingHooks:
        if self._after is None:
            self._after = _table(post_accumulate_grad_hooks(self.param))
            self._after.begin(self._on_user_hook)
            self._after.expose(self._after_accumulation)
            set_post_accumulate_grad_hooks(self.param, self._after)
        return self._after

    def adopt_post_accumulate_hooks(self) -> None:
        """Take over post-accumulate hooks that the user has registered since the last call.

        A table of lockstep's own from the start would cost a Python call for every parameter.
        """
        if post_accumulate_grad_hooks(self.param) is not None:
            self._adopt_post_accumulate_hooks()

    def apply_tensor_hooks(self, gradient: torch.Tensor) -> torch.Tensor:
        """The result of the user's hooks on the tensor for `gradient`."""
        return _apply_each(self._before.users, gradient)

    def run_post_accumulate_hooks(self) -> None:
        """Run the user's hooks that wait for ``param.grad`` to be complete."""
        if self._after is not None:
            _run_each(self._after.users, self.param)

    def release(self) -> None:
        """Let autograd run the user's hooks again, and none of lockstep's."""
        # The functions must not hold the parameter, whose memory would wait for the collector.
        users = self._before.users
        self._before.pass_on(lambda gradient: _apply_each(users, gradient))
        if self._after is not None:
            waiting = self._after.users
            self._after.pass_on(lambda param: _run_each(waiting, param))


def _apply_each(hooks: dict[int, Any], gradient: torch.Tensor) -> torch.Tensor:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        if changed is not None:
            gradient = changed
    return gradient


def _run_each(hooks: dict[int, Any], param: torch.Tensor) -> None:
    for hook in list(hooks.values()):
        hook(param)


class _HasRun(Exception):
    """Raised to stop a backward after its one node has run."""


class _RunInBackward(torch.autograd.Function):
    """A node whose backward calls a function, and stops."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], None], *params: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        return torch.zeros((), device="cpu")  # the engine runs it on this thread

    @staticmethod
    def backward(ctx: Any, root: torch.Tensor) -> Any:
        ctx.run()
        raise _HasRun


def run_inside_backward(params: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
    """Call `run` inside a backward whose graph leads to `params`, and stop before them.

    Hooks ask the engine what the running backward will reach: so does
    ``torch.autograd.graph.register_multi_grad_hook``, to know when all of its tensors came.
    """
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        root: torch.Tensor = _RunInBackward.apply(run, *params)  # type: ignore[no-untyped-call]
        with suppress(_HasRun):
            root.backward()


def is_accumulating(param: torch.Tensor) -> bool:
    """Inside a hook on `param`: whether the running backward adds to ``param.grad``.

    ``torch.autograd.grad`` and ``backward(inputs=others)`` do not. Torch answers for a leaf whose
    gradient is only returned by raising.
    """
    if not param.requires_grad:
        # Frozen since the forward: this gradient is dropped. Only a backward to all leaves, which
        # adds to those that are not frozen, reaches a frozen one.
        return True
    with torch.enable_grad():
        view = param.view_as(param).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    try:
        return will_execute_node(node)
    except RuntimeError:
        return False
