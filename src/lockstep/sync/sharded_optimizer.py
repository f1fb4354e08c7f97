# SPDX-License-Identifier: Apache-2.0
"""An optimizer of which every rank steps its own rows, and holds the state of those alone.

The user's own object stays, and outside of its `step` so does what it holds: its `param_groups`
are the model's parameters, whole and with whole gradients, for clipping, scalers and schedulers.
While its `step` runs they are shards; see `shards`. Afterwards the ranks exchange their rows.
"""

from __future__ import annotations

from contextlib import suppress
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, Protocol

from torch.optim import Adafactor, Optimizer

from lockstep.errors import LockstepError
from lockstep.sync.parameter_server.remote_optimizer import needs_closure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from lockstep.sync.parameter_shards import ShardOfParameter

_BETWEEN_HOOKS: Final = Optimizer.profile_hook_step(lambda: None).__code__
_SCHEDULERS: Final = "torch.optim.lr_scheduler"


class Rows(Protocol):
    """What an optimizer has to know of those with whom it shares the work."""

    def shard_of(self, param: torch.Tensor) -> ShardOfParameter | None:
        """None for one that stays whole, which every rank steps alike."""

    def state_in_shards(self, state: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
        """What an optimizer remembers of a parameter that has a shard."""

    def meet(self, optimizer: ShardedOptimizer) -> None:
        """Every rank: wait until all are about to step this one."""

    def gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Every rank: bring the peers' rows of whole tensors."""


def steps_whole(optimizer: Optimizer) -> bool:
    """Whether every rank has to take its whole step.

    One that evaluates the loss within a step may compute with what was there before it. Of
    Adafactor's state, a row and a column, nothing is to be saved, and DTensor lacks an operation.
    """
    return isinstance(optimizer, Adafactor) or needs_closure(optimizer)


class ShardedOptimizer:
    """One optimizer, until `release`.

    Args:
        optimizer: the user's. What it remembers already is shared out.
        rows: of its parameters.
    """

    def __init__(self, optimizer: Optimizer, rows: Rows) -> None:
        self.optimizer = optimizer
        self._rows = rows
        self._held: list[list[torch.Tensor]] = []
        self._lent: list[ShardOfParameter] = []
        self._stepped: list[ShardOfParameter] = []
        for param, state in optimizer.state.items():
            if rows.shard_of(param) is not None:
                state.update(rows.state_in_shards(state, param))
        self._handle = optimizer.register_load_state_dict_pre_hook(self._before_load)
        own = vars(optimizer)
        names = ("step", "_step_supports_amp_scaling")
        self._shadowed: dict[str, Any] = {name: own[name] for name in names if name in own}
        self._body = _body_of(optimizer)
        self._install()

    def _install(self) -> None:
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(*args, **kwargs)

        # Inside the hooks before and after a step: those see the user's own parameters.
        hooked: Any = Optimizer.profile_hook_step(step)
        hooked._wrapped_by_lr_sched = True
        attributes = vars(self.optimizer)
        attributes["step"] = MethodType(hooked, self.optimizer)
        if "_step_supports_amp_scaling" in attributes:
            # The scaler would leave the unscaling to a kernel that knows no shards.
            attributes["_step_supports_amp_scaling"] = False

    def release(self) -> None:
        """Make it an ordinary optimizer again; of its state each rank keeps its rows."""
        self._handle.remove()
        for name in ("step", "_step_supports_amp_scaling"):
            vars(self.optimizer).pop(name, None)
        vars(self.optimizer).update(self._shadowed)

    # ------------------------------------------------------------------------------- a step

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Step this rank's rows, and exchange them.

        Gradient:
            ``parameter.grad``, whole and alike on every rank, is consumed.

        Collective:
            Every rank: what the optimizer asks of whole tensors (norms), and an exchange of
            the weights' rows. With a closure, one more before each evaluation.

        Raises:
            GradientNotReducedError: another rank is at another place; nothing has changed.
            NotAvailableError: the optimizer put other tensors in the place of its parameters.
            PeerLostError: a rank left the step out, or went away.
        """
        self._rows.meet(self)
        # What schedulers look at, to warn of steps that were never taken.
        vars(self.optimizer)["_opt_called"] = True
        if callable(kwargs.get("closure")):
            kwargs["closure"] = self._on_whole_weights(kwargs["closure"])
        elif args and callable(args[0]):
            args = (self._on_whole_weights(args[0]), *args[1:])
        self._lend()
        try:
            result = self._body(self.optimizer, *args, **kwargs)
        except BaseException as error:
            moved = self._take_back()
            if isinstance(error, Exception) and moved:
                # Peers, for whom it went well, are about to gather; and rows that have moved
                # here would be another model's.
                with suppress(LockstepError):
                    self._rows.gather(moved)
            raise
        self._rows.gather(self._take_back())
        for shard in self._stepped:
            shard.check()
        return result

    def _on_whole_weights(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self._rows.gather(self._take_back())
            loss = closure(*args, **kwargs)
            self._lend()
            return loss

        return evaluate

    def _lend(self) -> None:
        """Exchange the parameters for their shards, in the groups and in the state."""
        optimizer = self.optimizer
        self._held = [list(group["params"]) for group in optimizer.param_groups]
        shards = {
            id(param): shard
            for params in self._held
            for param in params
            if (shard := self._rows.shard_of(param)) is not None
        }
        # An optimizer may have been given a set, of another order on every rank.
        self._lent = sorted(shards.values(), key=lambda shard: shard.number)
        for shard in self._lent:
            shard.lend()
            if shard.whole in optimizer.state:
                optimizer.state[shard.param] = optimizer.state.pop(shard.whole)
        for group, params in zip(optimizer.param_groups, self._held, strict=True):
            # In place: an optimizer may keep the list itself.
            group["params"][:] = [
                shards[id(param)].param if id(param) in shards else param for param in params
            ]

    def _take_back(self) -> list[torch.Tensor]:
        """The opposite; returns the tensors whose rows have to be gathered."""
        optimizer, lent = self.optimizer, self._lent
        self._lent = []
        if not lent:
            return []
        for group, params in zip(optimizer.param_groups, self._held, strict=False):
            group["params"][:] = params
        for shard in lent:
            if shard.param in optimizer.state:
                optimizer.state[shard.whole] = optimizer.state.pop(shard.param)
        self._stepped = lent
        return [tensor for shard in lent for tensor in shard.take_back()]

    # ------------------------------------------------------------------------------ its state

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Only this rank's rows of a whole state come to the device."""
        held = [param for group in optimizer.param_groups for param in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        params = dict(zip(numbers, held, strict=False))
        kept = {
            number: self._rows.state_in_shards(own, param)
            if (param := params.get(number)) is not None and self._rows.shard_of(param) is not None
            else own
            for number, own in state["state"].items()
        }
        return {**state, "state": kept}


def _body_of(optimizer: Optimizer) -> Callable[..., Any]:
    """What its `step` runs between the hooks, without what schedulers wrapped around it.

    Those wrappers are told from others by where they were made, and not by the marks on them,
    which a wrapper of the user's own takes over (`functools.wraps`).
    """
    own = vars(optimizer).get("step")
    step: Any = type(optimizer).step if own is None else own
    step = getattr(step, "__func__", step)
    while _is_torchs_wrapper(step):
        own, step = None, step.__wrapped__
    if own is None or isinstance(own, MethodType):
        found: Callable[..., Any] = step
        return found
    return lambda _, *args, **kwargs: step(*args, **kwargs)


def _is_torchs_wrapper(step: Any) -> bool:
    is_schedulers = getattr(step, "__globals__", {}).get("__name__") == _SCHEDULERS
    return is_schedulers or getattr(step, "__code__", None) is _BETWEEN_HOOKS
