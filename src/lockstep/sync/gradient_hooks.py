# SPDX-License-Identifier: Apache-2.0
"""The hooks of one synchronised parameter: ours, which autograd runs, and the user's, which wait.

A hook on a parameter means to see the gradient of the global batch. While backward runs there is
only this rank's share of it, scaled by its weight: whatever a hook adds, clamps or replaces
would be another thing on each rank, and what it does after its bucket has left races the
reduction. So autograd is shown our hooks alone; the user's are run once for each round, on the
reduced gradient, in the order in which autograd would have run them. Who registered first does
not matter then.

Rejected: letting buckets leave one gradient later (the user's hooks then still see a share), and
applying weights in the bucket where there are hooks (exact for what a hook adds, wrong for a
clamp).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_OURS: Final = -1
"""Torch numbers the hooks of users from 0."""


class _WaitingHooks(OrderedDict[int, Any]):
    """A parameter's table of hooks, of which autograd sees the one entry that is ours.

    Torch reads the table in C, past the methods here, and users write it through them. It stays
    on the parameter after `release`, because handles that users hold remove from it.

    Args:
        earlier: the table that the parameter had; handles to it stay good.

    Attributes:
        tell: called when the user registers a hook.
    """

    def __init__(self, earlier: dict[int, Any] | None) -> None:
        super().__init__()
        self.users: dict[int, Any] = OrderedDict() if earlier is None else earlier
        self.tell: Callable[[], object] | None = None

    def __setitem__(self, key: int, hook: Any) -> None:
        self.users[key] = hook
        if self.tell is not None:
            self.tell()

    def __contains__(self, key: object) -> bool:
        return key in self.users

    def __delitem__(self, key: int) -> None:
        del self.users[key]

    def show(self, hook: Callable[..., Any]) -> None:
        """Let autograd run `hook` and nothing else."""
        super().__setitem__(_OURS, hook)

    def pass_on(self, run_users: Callable[..., Any]) -> None:
        """Let autograd run `run_users`, as soon as there are hooks of the user's."""
        super().pop(_OURS, None)
        self.tell = lambda: self.show(run_users)
        if self.users:
            self.tell()


def _table(found: Any) -> _WaitingHooks:
    return found if isinstance(found, _WaitingHooks) else _WaitingHooks(found)


class ParameterHooks:
    """What happens when a gradient of `param` comes.

    Args:
        param: the parameter; frozen ones take hooks too, and may be unfrozen later.
        comes: called with a gradient that autograd has computed, before anything is done with
            it: also under ``torch.autograd.grad``, which accumulates nothing. Returns None, or
            the gradient to go on with.
        arrived: called when a gradient was added to ``param.grad``.
        tell: called when there are hooks of the user's: now, or when one is registered.
    """

    def __init__(
        self,
        param: torch.Tensor,
        comes: Callable[[torch.Tensor], torch.Tensor | None],
        arrived: Callable[[torch.Tensor], None],
        tell: Callable[[], object],
    ) -> None:
        self._param = param
        self._before = _table(param._backward_hooks)
        self._after = _table(param._post_accumulate_grad_hooks)
        self._before.tell = self._after.tell = tell
        if self._before.users or self._after.users:
            tell()
        self._before.show(comes)
        self._after.show(arrived)
        # Set anew in any case: setting is what makes torch look into the table.
        param._backward_hooks = self._before
        param._post_accumulate_grad_hooks = self._after

    def applied_to(self, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient` as the user's hooks on the tensor leave it."""
        return _passed_through(self._before.users, gradient)

    def run(self, param: torch.Tensor, earlier: torch.Tensor | None) -> None:
        """Run the user's hooks on what a round has added to ``param.grad``.

        Args:
            param: the parameter; its ``grad`` is complete.
            earlier: what ``param.grad`` held before the round.
        """
        grad = param.grad
        assert grad is not None
        if self._before.users:
            added = grad if earlier is None else grad - earlier
            changed = self.applied_to(added)
            if changed is not added:
                grad.copy_(changed if earlier is None else earlier + changed)
        for hook in list(self._after.users.values()):
            hook(param)

    def release(self) -> None:
        """From now on autograd runs the user's hooks again, and none of ours."""
        before, after, param = self._before, self._after, self._param

        def run_after(_: torch.Tensor) -> None:
            for hook in list(after.users.values()):
                hook(param)

        before.pass_on(self.applied_to)
        after.pass_on(run_after)


def _passed_through(hooks: dict[int, Any], gradient: torch.Tensor) -> torch.Tensor:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        if changed is not None:
            gradient = changed
    return gradient


def accumulates(param: torch.Tensor) -> bool:
    """Inside a hook on `param`: does the running backward add to ``param.grad``?

    ``torch.autograd.grad`` and ``backward(inputs=others)`` do not. Torch answers for a leaf whose
    gradient is only returned by raising.
    """
    with torch.enable_grad():
        view = param.view_as(param).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False
