# SPDX-License-Identifier: Apache-2.0
"""A worker's optimizer whose steps happen at the parameter server.

The user's own object stays: schedulers, loops and scalers hold it. Its `step`, `state_dict` and
`load_state_dict` are replaced on the instance; its `param_groups` stay the place where learning
rates are read and changed, and travel with every step. So are `state_dict` and `load_state_dict`
of the optimizers within it (Lookahead holds one), which the server steps with it.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from lockstep.errors import NotAvailableError, NotPicklableError
from lockstep.randomness import RandomState
from lockstep.sync.local_parameters import is_local
from lockstep.sync.optimizer_inspection import (
    evaluates_closure_first,
    inner_optimizers,
    load_state,
    needs_closure,
    optimizer_parameters,
    optimizers_with_state,
    own_attributes,
    state_tensors,
)
from lockstep.sync.optimizer_step_patch import (
    LoadElsewhere,
    OptimizerMethodPatch,
    OptimizerStepPatch,
)
from lockstep.sync.parameter_server.messages import Message, OptimizerRequest
from lockstep.sync.parameter_server.optimizer_attributes import (
    NotSent,
    OptimizerAttributes,
    changes_between,
    marks_of,
)
from lockstep.sync.parameter_server.state_at_server import StateAtServer, state_error
from lockstep.tensor_tree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.optim import Optimizer

    from lockstep.sync.parameter_server.messages import Channel, Groups
    from lockstep.sync.parameter_server.optimizer_attributes import Changes, Packed


class RemoteOptimizer:
    """The worker's side of one optimizer.

    Args:
        optimizer: the user's; its state is the server's from now on.
        number: among those that the server holds.
        number_of: the number of a parameter, by its identity.
        channel: the way to the server.
        server_weights: on rank 0, whose gradients and weights count, the weights as the server
            has them, by number; all optimizers share it. None on the other ranks.
        has_state: the server has a state of it already.
        attributes: those that the server has, if they may be others than here.

    Attributes:
        undo_point: the step to which a failure from now on would take the run back: the server
            logs what it needs to return there. None: the server's steps are final.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        number_of: Mapping[int, int],
        channel: Channel,
        *,
        server_weights: dict[int, torch.Tensor] | None,
        has_state: bool = False,
        attributes: Changes | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.undo_point: int | None = None
        self._number = number
        self._number_of = number_of
        self._channel = channel
        self._server_weights = server_weights
        self._replaced = OptimizerStepPatch(
            optimizer,
            self._step,
            state_dict=self._state_dict,
            load_state_dict=LoadElsewhere(self._load_state_dict),
        )
        # By their places; without those that the server has for themselves as well.
        inner = enumerate(inner_optimizers(optimizer))
        self._inner = {n: each for n, each in inner if "state_dict" not in vars(each)}
        self._stepped_here: set[int] = set()
        self._replaced_within = [
            OptimizerMethodPatch(
                each,
                state_dict=partial(self._state_dict_within, place),
                load_state_dict=LoadElsewhere(partial(self._load_state_dict_within, place)),
            )
            for place, each in self._inner.items()
        ]
        self._step_hooks = [
            each.register_step_pre_hook(partial(self._note_step_here, place))
            for place, each in self._inner.items()
        ]
        # The server has the state: a copy here would cost memory, and be stale.
        self._before: Any = optimizer.state
        self._before.clear()
        self._state = StateAtServer()
        self._put_state(self._state)
        self._state.is_there = has_state
        self._sent: tuple[int | None, Changes] = None, {}  # attributes since an undo point
        packed = self._attributes().pack()
        self.set_attributes({k: v for k, v in (attributes or {}).items() if packed.get(k) != v})
        # Those that the server has, as it has them; a new worker may have more.
        self._known_attributes: Packed = {
            key: packed
            for key, packed in self._attributes().pack().items()
            if not attributes or key in attributes or isinstance(packed, NotSent)
        }

    def _put_state(self, state: Any) -> None:
        """Let the optimizer, and those within it that share its state, have this one."""
        optimizer = self.optimizer
        sharing = [each for each in inner_optimizers(optimizer) if each.state is optimizer.state]
        for each in (optimizer, *sharing):
            each.state = state

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the gradients, let the server step, and fetch the weights.

        Gradient:
            Rank 0's ``parameter.grad``, which every rank holds alike, are consumed.

        Collective:
            Every rank. Blocks.

        Raises:
            NotAvailableError: there is a closure that the step may evaluate in its midst, or a
                state that the loop has put here.
        """
        self._refuse_state_here()
        loss = None
        if closure is not None:
            if not evaluates_closure_first(self.optimizer):
                raise _closure_error(type(self.optimizer).__name__)
            with torch.enable_grad():
                loss = closure()
        held = optimizer_parameters(self.optimizer)
        graded = [param for param in held if param.grad is not None]
        request = self._request("step")
        request.body.with_gradient = [self._number_of[id(param)] for param in graded]
        if self._server_weights is not None:
            gradients = [param.grad for param in graded if param.grad is not None]
            request.tensors = [*request.tensors, *gradients]
            # A step that draws (Langevin noise) draws what it would draw here.
            request.body.random_state = RandomState.capture_host()
        point, sent = self._sent
        sent = sent if point == self.undo_point else {}
        self._sent = self.undo_point, {**sent, **request.body.attributes}
        answer = self._channel.ask(request)
        changed, has_state, attributes = answer.body
        with self._state.as_empty():
            for each in self._inner.values():
                each.state.clear()  # the server has stepped it
        self._state.is_there = has_state
        for group, settings in zip(self.optimizer.param_groups, changed, strict=True):
            group.update(settings)
        with torch.no_grad():
            for param, weight in zip(held, answer.tensors, strict=True):
                param.copy_(weight)
                if self._server_weights is not None:
                    number = self._number_of[id(param)]
                    self._server_weights[number] = weight.to(param.device)
        own = self._attributes()
        own.put(attributes)
        known = self._known_attributes.keys()
        self._known_attributes = {
            key: packed
            for key, packed in own.pack().items()
            if key in known or not isinstance(packed, NotSent)
        }
        return loss

    def _refuse_state_here(self) -> None:
        """Raise if a step would miss a state that the loop has written, or assigned, here."""
        state = self.optimizer.state
        with self._state.as_empty():
            is_written = any(not isinstance(each, dict) or each for each in state.values())
        if is_written or (self._state.is_there and state is not self._state):
            raise state_error()
        self._put_state(self._state)

    def _was_written_to(self, param: torch.Tensor) -> bool:
        """Whether the loop clipped, loaded, averaged or added a weight since the server gave it.

        Compared by value: a version counter misses a write through ``param.data``.
        """
        if self._server_weights is None:
            return False
        latest = self._server_weights.get(self._number_of.get(id(param), -1))
        return latest is None or not torch.equal(latest, param)

    def _request(self, kind: str, state: Any = None, inner: int | None = None) -> Message:
        """A request with the settings and, from rank 0, the weights that the server lacks."""
        weights = [p for p in optimizer_parameters(self.optimizer) if self._was_written_to(p)]
        request = OptimizerRequest(
            self._number,
            self._groups(),  # first: it refuses parameters that have no number
            [self._number_of[id(param)] for param in weights],
            state=state,
            inner=inner,
            undo_point=self.undo_point,
            attributes=self._changed_attributes(),
            frozen=[
                self._number_of[id(param)]
                for param in optimizer_parameters(self.optimizer)
                if not param.requires_grad
            ],
        )
        return Message(kind, request, weights)

    def set_attributes(self, changes: Changes) -> None:
        """Let the optimizer have attributes that the server has, or that the loop has changed."""
        self._attributes().put(changes)

    def loop_changes(self, resume_step: int) -> Changes:
        """The attributes that the loop has changed and that the server, gone back, lacks.

        What a loop sets is no part of a step: it stays where a step is undone. What the undone
        step itself had changed goes back.

        Args:
            resume_step: the step to which the server has gone back.
        """
        point, sent = self._sent
        return {**(sent if point == resume_step else {}), **self._changed_attributes()}

    def _attributes(self) -> OptimizerAttributes:
        held = optimizer_parameters(self.optimizer)
        return OptimizerAttributes(self.optimizer, {self._number_of[id(p)]: p for p in held})

    def _changed_attributes(self) -> Changes:
        """What the loop has changed since the last step; a new one that is not sent stays here.

        Raises:
            NotAvailableError: the server has an attribute whose new value is not sent.
        """
        own, changes = self._attributes(), {}
        for key, packed in changes_between(self._known_attributes, own.pack()).items():
            if not isinstance(packed, NotSent):
                changes[key] = packed
            elif key in self._known_attributes:
                raise NotAvailableError(
                    "an attribute of an optimizer cannot be sent to the parameter server",
                    where=f"`{own.name_of(key)}`",
                    got=f"a {type(packed.value).__name__}, set after register()",
                    cause="it refers to modules, optimizers or parameters' memory, or cannot be"
                    " pickled",
                    fix="set it before register(), change a number, word or tensor there instead,"
                    ' or leave sync="parameter_server" out',
                )
        return changes

    def _groups(self) -> Groups:
        """``param_groups`` as the server needs them: with numbers for parameters, on the CPU.

        Raises:
            NotAvailableError: a parameter that came later and belongs to no registered module.
        """
        groups: Groups = []
        for group in self.optimizer.param_groups:
            settings = {name: _to_cpu(item) for name, item in group.items() if name != "params"}
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
        """The server's state, with the settings as they are here."""
        with self._state.as_empty():
            own = type(self.optimizer).state_dict(self.optimizer)
        return {**self._state_at_server(), "param_groups": own["param_groups"]}

    def _state_at_server(self, inner: int | None = None) -> dict[str, Any]:
        answer = self._channel.ask(self._request("state_dict", inner=inner))
        # A copy: what arrived shares one block of memory, or is the store's own in this process.
        state: dict[str, Any] = copy.deepcopy(answer.body)
        return state

    def _load_state_dict(self, state: Mapping[str, Any], *, of_same_weights: bool) -> None:
        """Load into the server's optimizer; called on every rank, as it is on one process."""
        optimizer = self.optimizer
        # Load the settings here, and an empty state, because the server holds the state.
        with self._state.as_empty():
            type(optimizer).load_state_dict(optimizer, {**state, "state": {}})
        self._put_state(self._state)
        self._state.is_there = bool(state.get("state"))
        self._load_at_server(state, of_same_weights=of_same_weights)

    def _load_at_server(
        self, state: Mapping[str, Any], inner: int | None = None, *, of_same_weights: bool
    ) -> None:
        if self._server_weights is not None:
            request = self._request("load_state_dict", _to_cpu(dict(state)), inner)
            request.body.of_same_weights = of_same_weights
            self._channel.ask(request)

    def _note_step_here(self, place: int, *_: Any) -> None:
        """Note that the loop steps an optimizer within this one (SAM's `second_step` does).

        It does so on every rank alike, and this one never steps: the state is here.
        """
        self._stepped_here.add(place)

    def _state_dict_within(self, place: int) -> dict[str, Any]:
        """The state of an optimizer within this one, from where it steps."""
        inner = self._inner[place]
        with self._state.as_empty():
            own = type(inner).state_dict(inner)
            if inner.state or place in self._stepped_here:
                return own
        return {**self._state_at_server(place), "param_groups": own["param_groups"]}

    def _load_state_dict_within(
        self, place: int, state: Mapping[str, Any], *, of_same_weights: bool
    ) -> None:
        """Load here, and into the server's: before a step it is open which of the two will step."""
        inner = self._inner[place]
        with self._state.as_empty():
            type(inner).load_state_dict(inner, dict(state))
        # After a death a loop's step is undone without a server.
        if place not in self._stepped_here:
            self._load_at_server(state, place, of_same_weights=of_same_weights)

    def release(self, *, keep_state: bool) -> None:
        """Make the optimizer an ordinary one again.

        Args:
            keep_state: fetch the server's state first; it must be there to answer.
        """
        members = optimizers_with_state([self.optimizer])
        states = [each.state_dict() for each in members] if keep_state else []
        for patch in reversed((self._replaced, *self._replaced_within)):
            patch.restore()
        for hook in self._step_hooks:
            hook.remove()
        self._put_state(self._before)
        for each, state in zip(members, states, strict=False):
            load_state(each, state)


def _closure_error(name: str) -> NotAvailableError:
    return NotAvailableError(
        "a closure cannot go to the parameter server, where the step happens",
        got=f"{name}.step(closure)",
        cause="this step may evaluate it later than first, or again (SAM does): only torch's own"
        " optimizers are known to evaluate it once, before they step",
        fix="where the step only begins with it: call closure(), then optimizer.step(); where it"
        ' computes the loss again: leave sync="parameter_server" out',
    )


def optimizers_to_serve(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers whose steps are to happen at the server; one of local parameters stays.

    Raises:
        NotAvailableError: an optimizer that cannot step elsewhere.
    """
    found: list[Optimizer] = []
    for number, optimizer in enumerate(optimizers):
        params = optimizer_parameters(optimizer)
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


def pickle_optimizers(
    optimizers: Sequence[Optimizer], parameters: Mapping[int, torch.Tensor]
) -> bytes:
    """Copies of optimizers and of the parameters that they hold, on the CPU, as bytes.

    Raises:
        NotPicklableError: an optimizer that cannot be sent to another process.
    """
    number_of = {id(param): number for number, param in parameters.items()}
    copies: dict[int, torch.nn.Parameter] = {}
    memo: dict[int, Any] = {}
    for optimizer in optimizers:
        for param in optimizer_parameters(optimizer):
            if id(param) not in memo:
                values = param.detach().to("cpu", copy=True)
                copied = torch.nn.Parameter(values, requires_grad=param.requires_grad)
                vars(copied).update(_to_cpu(marks_of(param)))
                memo[id(param)] = copies[number_of[id(param)]] = copied
    members = dict.fromkeys(m for each in optimizers for m in (each, *inner_optimizers(each)))
    for member in members:
        for tensor in state_tensors(member):
            memo[id(tensor)] = tensor.detach().to("cpu", copy=True)
    try:
        served = copy.deepcopy(list(optimizers), memo)
        # Optimizers leave attributes of their own out when they are copied or pickled.
        attributes = copy.deepcopy([(each, own_attributes(each)) for each in members], memo)
        ids = {id(param): number for number, param in parameters.items() if number in copies}
        data: bytes = cloudpickle.dumps((copies, served, attributes, ids))
    # Whatever a user's `__reduce__` or `__deepcopy__` raises.
    except Exception as error:
        raise NotPicklableError(
            "the optimizers cannot be sent to the parameter server",
            got=f"{type(error).__name__}: {error}",
            fix="keep what cannot be pickled (locks, files, loggers) out of their attributes",
        ) from error
    return data


def _to_cpu(value: Any) -> Any:
    """`value` with its tensors on the CPU."""
    return tree_map(
        lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, value
    )
