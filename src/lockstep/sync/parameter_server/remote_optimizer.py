# SPDX-License-Identifier: Apache-2.0
"""A worker's optimizer whose steps happen at the owner of the parameters.

The user's own object stays: schedulers, loops and scalers hold it. Its `step`, `state_dict` and
`load_state_dict` are replaced on the instance; its `param_groups` stay the place where learning
rates are read and changed, and travel with every step.
"""

from __future__ import annotations

import copy
import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch.optim import Optimizer

from lockstep.errors import NotAvailableError, NotPicklableError
from lockstep.sync.local_parameters import is_local
from lockstep.sync.parameter_server.messages import Message
from lockstep.sync.parameter_server.optimizer_undo_log import REPLACED, own_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from lockstep.sync.parameter_server.messages import Channel
    from lockstep.sync.parameter_server.parameter_store import Groups


class RemoteOptimizer:
    """The worker's side of one optimizer.

    Args:
        optimizer: the user's; its state is the owner's from now on.
        number: among those that the owner holds.
        number_of: the number of a parameter, by its identity.
        channel: the way to the owner.
        owned: on rank 0, whose gradients and weights count, the weights as the owner has them,
            by number; None on the others.

    Attributes:
        may_go_back_to: steps of the run to which an interruption now leads back, the owner's
            state with the rest; None: what the owner does from now on stays.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        number_of: Mapping[int, int],
        channel: Channel,
        *,
        owned: Mapping[int, torch.Tensor] | None,
    ) -> None:
        self.optimizer = optimizer
        self.may_go_back_to: int | None = None
        self._number = number
        self._number_of = number_of
        self._channel = channel
        self._leads = owned is not None
        numbers = {id(param): number_of.get(id(param), -1) for param in _held(optimizer)}
        self._latest = {key: owned[n] for key, n in numbers.items() if owned and n in owned}
        own = vars(optimizer)
        self._shadowed: dict[str, Any] = {name: own[name] for name in REPLACED if name in own}
        self._install()

    def _install(self) -> None:
        optimizer = self.optimizer
        if "_step_supports_amp_scaling" in vars(optimizer):
            # The scaler would leave the unscaling to a kernel that runs elsewhere.
            vars(optimizer)["_step_supports_amp_scaling"] = False
        # Already adopted: what is left here would only be memory, and stale.
        optimizer.state.clear()

        def step(this: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            # What schedulers look at, to warn of steps that were never taken.
            vars(this)["_opt_called"] = True
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._take_step()
            return loss

        # With the hooks before and after a step, the guard's most of all.
        hooked: Any = Optimizer.profile_hook_step(step)
        hooked._wrapped_by_lr_sched = True
        vars(optimizer).update(
            step=MethodType(hooked, optimizer),
            state_dict=self._state_dict,
            load_state_dict=self._load_state_dict,
        )

    def _take_step(self) -> None:
        """Send, let the owner step, and fetch.

        Gradient:
            Rank 0's ``parameter.grad``, which every rank holds alike, are consumed.

        Collective:
            Every rank. Blocks.
        """
        held = _held(self.optimizer)
        graded = [param for param in held if param.grad is not None]
        written_to = [param for param in held if self._leads and self._was_written_to(param)]
        request = self._request("step", written_to)
        request.about["with_gradient"] = [self._number_of[id(param)] for param in graded]
        if self._leads:
            gradients = [param.grad for param in graded if param.grad is not None]
            request.tensors = [*written_to, *gradients]
        answer = self._channel.ask(request)
        for group, settings in zip(self.optimizer.param_groups, answer.about, strict=True):
            group.update(settings)
        with torch.no_grad():
            for param, weight in zip(held, answer.tensors, strict=True):
                param.copy_(weight)
                if self._leads:
                    self._latest[id(param)] = weight.to(param.device)

    def _was_written_to(self, param: torch.Tensor) -> bool:
        """Since the owner gave it: clipped, loaded, averaged by the user's own loop.

        Compared by value: a version counter misses what goes through ``param.data``.
        """
        latest = self._latest.get(id(param))
        return latest is None or not torch.equal(latest, param)

    def _request(self, what: str, weights: Sequence[torch.Tensor], state: Any = None) -> Message:
        about = {
            "number": self._number,
            "groups": self._groups(),
            "weights": [self._number_of[id(param)] for param in weights],
            "state": state,
            "may_go_back_to": self.may_go_back_to,
        }
        return Message(what, about, weights)

    def _unknown(self) -> list[torch.Tensor]:
        """Parameters that were added to the optimizer and have not been sent yet."""
        return [p for p in _held(self.optimizer) if self._leads and id(p) not in self._latest]

    def _groups(self) -> Groups:
        """What the owner has to know of ``param_groups``.

        Raises:
            NotAvailableError: a parameter that came later and belongs to no registered module.
        """
        groups: Groups = []
        for group in self.optimizer.param_groups:
            settings = {name: _on_cpu(item) for name, item in group.items() if name != "params"}
            numbers = [self._number_of.get(id(param), -1) for param in group["params"]]
            if -1 in numbers:
                position = numbers.index(-1)
                raise NotAvailableError(
                    "the optimizer holds a parameter that the parameter server does not know",
                    got=f"one of shape {tuple(group['params'][position].shape)}",
                    cause="it was added or replaced after register()",
                    fix="build the model completely before register()",
                )
            groups.append((settings, numbers))
        return groups

    def _state_dict(self) -> dict[str, Any]:
        """The owner's state, with the settings as they are here."""
        answer = self._channel.ask(self._request("state", self._unknown()))
        state: dict[str, Any] = cloudpickle.loads(answer.about)
        state["param_groups"] = type(self.optimizer).state_dict(self.optimizer)["param_groups"]
        return state

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Into the owner; called on every rank, as it is on one process."""
        optimizer = self.optimizer
        # The settings are this object's; an empty state, for the owner holds it.
        type(optimizer).load_state_dict(optimizer, {**state, "state": {}})
        optimizer.state.clear()
        if self._leads:
            self._channel.ask(self._request("load", self._unknown(), _on_cpu(dict(state))))

    def release(self, *, keep_state: bool) -> None:
        """Make the optimizer an ordinary one again.

        Args:
            keep_state: fetch the owner's state first; it must be there to answer.
        """
        state = self._state_dict() if keep_state else None
        attributes: dict[str, Any] = vars(self.optimizer)
        for name in REPLACED:
            attributes.pop(name, None)
        attributes.update(self._shadowed)
        if state is not None:
            self.optimizer.load_state_dict(state)


def optimizers_to_serve(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Those whose steps can happen elsewhere; one that holds only local parameters stays.

    Raises:
        NotAvailableError: an optimizer that cannot step elsewhere.
    """
    found: list[Optimizer] = []
    for number, optimizer in enumerate(optimizers):
        params = _held(optimizer)
        local = [param for param in params if is_local(param)]
        if len(local) == len(params):
            continue
        where = f"optimizer {number} ({type(optimizer).__name__})"
        if local:
            raise NotAvailableError(
                "an optimizer holds parameters of this rank alone and parameters of all",
                where=where,
                cause="the parameter server steps with what all ranks share",
                fix="make an optimizer of their own for the local parameters",
            )
        if needs_closure(optimizer):
            raise NotAvailableError(
                "this optimizer evaluates the loss within a step, which happens elsewhere",
                where=where,
                fix='leave sync="parameter_server" out, or use an optimizer that steps once',
            )
        found.append(optimizer)
    return found


def needs_closure(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def shipped(optimizers: Sequence[Optimizer], parameters: Mapping[int, torch.Tensor]) -> bytes:
    """Copies of optimizers and of the parameters that they hold, on the CPU, as bytes.

    Raises:
        NotPicklableError: an optimizer that cannot be sent to another process.
    """
    number_of = {id(param): number for number, param in parameters.items()}
    copies: dict[int, torch.nn.Parameter] = {}
    memo: dict[int, Any] = {}
    for optimizer in optimizers:
        for param in _held(optimizer):
            if id(param) not in memo:
                twin = torch.nn.Parameter(param.detach().to("cpu", copy=True))
                memo[id(param)] = copies[number_of[id(param)]] = twin
        for tensors in optimizer.state.values():
            for tensor in tensors.values() if isinstance(tensors, dict) else ():
                if isinstance(tensor, torch.Tensor):
                    memo[id(tensor)] = tensor.detach().to("cpu", copy=True)
    try:
        # Optimizers leave attributes of their own out when they are copied or pickled.
        twins = [
            (copy.deepcopy(optimizer, memo), copy.deepcopy(own_attributes(optimizer), memo))
            for optimizer in optimizers
        ]
        data: bytes = cloudpickle.dumps((copies, twins))
    # Whatever a user's `__reduce__` or `__deepcopy__` raises.
    except Exception as error:
        raise NotPicklableError(
            "the optimizers cannot be sent to the parameter server",
            got=f"{type(error).__name__}: {error}",
            fix="keep what cannot be pickled (locks, files, loggers) out of their attributes",
        ) from error
    return data


def _held(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) is dict:
        return {key: _on_cpu(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(item) for item in value)
    return value
