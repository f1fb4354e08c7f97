# SPDX-License-Identifier: Apache-2.0
"""The hooks of one synchronised parameter: ours, which autograd runs, and the user's, which wait.

A hook on a parameter means to see the gradient of the global batch. While backward runs there is
only this rank's share of it, scaled by its weight: whatever a hook adds, clamps or replaces would
be another thing on each rank, and a write after its bucket has left races the reduction. So
autograd is shown our hooks alone; the user's are run once for each round, on the reduced gradient,
in the order in which autograd would have run them. It does not matter then whether the user or
lockstep registered first.

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
    hooks_after,
    hooks_before,
    set_hooks_after,
    set_hooks_before,
    will_run,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OURS: Final = -1
"""Torch numbers the hooks of users from 0."""


class _WaitingHooks(OrderedDict[int, Any]):
    """A parameter's table of hooks, of which autograd sees the one entry that is ours.

    Torch reads the table in C, past the methods here, and users write it through them. The table
    stays on the parameter after `release`, because handles that users hold remove from it.

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

    def begin(self, tell: Callable[[], object]) -> None:
        """Keep the user's hooks back from now on."""
        self.tell = tell
        if self.users:
            tell()

    def show(self, hook: Callable[..., Any]) -> None:
        """Let autograd run `hook` and nothing else."""
        super().__setitem__(_OURS, hook)

    def pass_on(self, run_users: Callable[..., Any]) -> None:
        """Let autograd run `run_users`, as soon as there are hooks of the user's."""
        super().pop(_OURS, None)
        self.tell = lambda: self.show(run_users)
        if self.users:
            self.tell()


def _nothing(_: torch.Tensor) -> None:
    """Shown to autograd where only hooks of the user's wait."""


def _table(found: Any) -> _WaitingHooks:
    return found if isinstance(found, _WaitingHooks) else _WaitingHooks(found)


class ParameterHooks:
    """The hooks that run when a gradient of `param` comes.

    Args:
        param: the parameter; frozen ones take hooks too, and may be unfrozen later.
        comes: called with a gradient that autograd has computed, before anything is done with
            it: also under ``torch.autograd.grad``, which accumulates nothing. Returns None, or
            the gradient to go on with.
        arrived: called when a gradient was added to ``param.grad``; None: no call.
        tell: called when there are hooks of the user's: now, or when one is registered.

    Attributes:
        param: the same.
    """

    def __init__(
        self,
        param: torch.Tensor,
        comes: Callable[[torch.Tensor], torch.Tensor | None],
        arrived: Callable[[torch.Tensor], None] | None,
        tell: Callable[[], object],
    ) -> None:
        self.param = param
        self._tell = tell
        self._arrived = arrived or _nothing
        self._before = _table(hooks_before(param))
        self._before.begin(tell)
        self._before.show(comes)
        # Set anew in any case: torch looks into the table when the attribute is set.
        set_hooks_before(param, self._before)
        self._after: _WaitingHooks | None = None
        if arrived is not None or hooks_after(param) is not None:
            self._take_over_after()

    def _take_over_after(self) -> _WaitingHooks:
        if self._after is None:
            self._after = _table(hooks_after(self.param))
            self._after.begin(self._tell)
            self._after.show(self._arrived)
            set_hooks_after(self.param, self._after)
        return self._after

    def look_after(self) -> None:
        """Before a gradient is accumulated: has the user registered a first hook behind it?

        A table of ours from the start would cost a call into Python for every parameter.
        """
        if hooks_after(self.param) is not None:
            self._take_over_after()

    def applied_to(self, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient` as the user's hooks on the tensor leave it."""
        return _passed_through(self._before.users, gradient)

    def run_after(self) -> None:
        """Run the user's hooks that wait for ``param.grad`` to be complete."""
        if self._after is not None:
            _run_each(self._after.users, self.param)

    def release(self) -> None:
        """From now on autograd runs the user's hooks again, and none of ours."""
        # Nothing here holds the parameter: its memory would wait for the garbage collector.
        users = self._before.users
        self._before.pass_on(lambda gradient: _passed_through(users, gradient))
        if self._after is not None:
            waiting = self._after.users
            self._after.pass_on(lambda param: _run_each(waiting, param))


def _passed_through(hooks: dict[int, Any], gradient: torch.Tensor) -> torch.Tensor:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        if changed is not None:
            gradient = changed
    return gradient


def _run_each(hooks: dict[int, Any], param: torch.Tensor) -> None:
    for hook in list(hooks.values()):
        hook(param)


class _HasRun(Exception):
    """Ends a backward that was there for one node."""


class _Inside(torch.autograd.Function):
    """A node whose backward calls a function, and stops."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], None], *params: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        return torch.zeros((), device="cpu")  # the engine runs it on this thread

    @staticmethod
    def backward(ctx: Any, root: torch.Tensor) -> Any:
        ctx.run()
        raise _HasRun


def inside_a_backward(params: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
    """Call `run` inside a backward that would reach `params`, and does not.

    Hooks ask the engine what the running backward will reach: so does
    ``torch.autograd.graph.register_multi_grad_hook``, to know when all of its tensors came.
    """
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        root: torch.Tensor = _Inside.apply(run, *params)  # type: ignore[no-untyped-call]
        with suppress(_HasRun):
            root.backward()


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
        return will_run(node)
    except RuntimeError:
        return False
