# SPDX-License-Identifier: Apache-2.0
"""The parameters and optimizers that a parameter server holds, and its answers to the workers.

The store knows no model and computes no loss. It answers one request after the other. A request
in which all ranks take part is answered when all have sent it: so the store notices a rank that
sends another request than its peers, instead of leaving them waiting.
"""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import (
    GradientNotReducedError,
    PeerLostError,
    ReplicasDifferError,
    WorkerFailedError,
)
from lockstep.randomness import preserve_rng_state
from lockstep.serialization import dumps_exception
from lockstep.sync.optimizer_inspection import inner_optimizers, load_state, optimizer_parameters
from lockstep.sync.parameter_references import by_number, replaced
from lockstep.sync.parameter_server.messages import Message
from lockstep.sync.parameter_server.optimizer_attributes import (
    NotSent,
    OptimizerAttributes,
    changes_between,
)
from lockstep.sync.parameter_server.optimizer_undo_log import OptimizerUndoLog
from lockstep.sync.parameter_server.server_connection import raise_if_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from lockstep.sync.parameter_server.messages import Groups, OptimizerRequest
    from lockstep.sync.parameter_server.optimizer_attributes import Changes, Packed

_OF_ONE_RANK: Final = frozenset({"state_dict", "load_state_dict"})
_LOW_PRECISION: Final = (torch.float16, torch.bfloat16)


class ParameterStore:
    """Parameters and optimizers of `size` workers.

    Requests, by their kind; all ranks take part in the first three:

    - "attach": take over rank 0's parameters and optimizers (the body is `pickle_optimizers`),
      or go on with those of the generation before, without the steps that no worker which is
      left has counted (the body is the number of steps that count). The answer is the weights,
      which optimizers have a state, and in another generation the attributes of each.
    - "all_reduce": the answer is the sum over the ranks, added in their order.
    - "step": an optimizer steps with rank 0's gradients. The answer is the new weights, the
      settings of its groups that the step has changed, whether it has a state now, and the
      attributes and marks that the step has changed.
    - "state_dict", "load_state_dict": of an optimizer, or of one within it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._asked: dict[int, Message] = {}
        self._left: set[int] = set()
        self._parameters: dict[int, torch.nn.Parameter] = {}
        self._optimizers: list[Optimizer] = []
        self._undo_log = OptimizerUndoLog()

    def make_successor(self, size: int) -> ParameterStore:
        """The store of another generation of `size` workers: same parameters and optimizers."""
        successor = ParameterStore(size)
        successor._parameters, successor._optimizers = self._parameters, self._optimizers
        successor._undo_log = self._undo_log
        return successor

    @property
    def is_idle(self) -> bool:
        """Whether no worker waits for another one."""
        return not self._asked

    def leave(self, rank: int) -> None:
        """Note that rank `rank` sends no more requests."""
        self._left.add(rank)

    def handle(self, rank: int, message: Message) -> dict[int, Message]:
        """Take a request of rank `rank`; returns the answers that are due now, by rank."""
        if message.kind in _OF_ONE_RANK:
            return {rank: _answer(lambda: self._state(message))}
        self._asked[rank] = message
        if self._left:
            waiting, self._asked = list(self._asked), {}
            return dict.fromkeys(waiting, _refusal(_left_error(sorted(self._left))))
        if len(self._asked) < self._size:
            return {}
        asked, self._asked = [self._asked[each] for each in range(self._size)], {}
        return dict.fromkeys(range(self._size), _answer(lambda: self._together(asked)))

    def _state(self, message: Message) -> Message:
        request: OptimizerRequest = message.body
        if message.kind == "load_state_dict":
            self._log_for_undo(request)
        optimizer = self._update_optimizer(request, message.tensors)
        if request.inner is not None:
            optimizer = inner_optimizers(optimizer)[request.inner]
        if message.kind == "state_dict":
            return Message("done", optimizer.state_dict())
        # An optimizer within it goes on to share its groups, which requests change.
        load_state(optimizer, request.state, of_same_weights=request.of_same_weights)
        return Message("done")

    def _together(self, asked: Sequence[Message]) -> Message:
        texts = [_in_words(message) for message in asked]
        if any(text != texts[0] for text in texts):
            raise _out_of_step_error(texts)
        if asked[0].kind == "attach":
            return self._attach(asked[0].body)
        return self._sum(asked) if asked[0].kind == "all_reduce" else self._step(asked)

    def _attach(self, body: bytes | int) -> Message:
        if isinstance(body, int):
            self._undo_log.return_to(body)
            attributes = [self._changed_attributes(each, {}) for each in self._optimizers]
        else:
            self._parameters, self._optimizers, own_of_each, ids = pickle.loads(body)
            # The parameters in there are the ones here; their ids are still those at rank 0.
            replace = by_number({key: self._parameters[number] for key, number in ids.items()})
            for optimizer, own in own_of_each:
                vars(optimizer).update(replaced(own, replace))
            attributes = [{}] * len(self._optimizers)  # rank 0's: here as there
        weights = [param.detach() for param in self._parameters.values()]
        have_states = [bool(optimizer.state) for optimizer in self._optimizers]
        return Message("done", (list(self._parameters), have_states, attributes), weights)

    def _sum(self, asked: Sequence[Message]) -> Message:
        """The sum of the tensors that the ranks sent, added in rank order.

        Gradient:
            Added, not divided: the weight of the sum travels behind the gradients.

        Collective:
            Every worker has asked for it.
        """
        total = asked[0].tensors[0]
        dtype = total.dtype
        if dtype in _LOW_PRECISION:
            total = total.float()
        for message in asked[1:]:
            total.add_(message.tensors[0])
        return Message("done", tensors=[total.to(dtype)])

    def _step(self, asked: Sequence[Message]) -> Message:
        """One step of one optimizer.

        Gradient:
            Rank 0's, which are the global ones, after what its loop did to them.

        Collective:
            Every worker has asked for it.
        """
        _refuse_different([_settings_in_words(message.body.groups) for message in asked])
        request: OptimizerRequest = asked[0].body
        self._log_for_undo(request)
        changes = [message.body.attributes for message in asked]
        request.attributes = self._common_attributes(request, changes)
        optimizer = self._update_optimizer(request, asked[0].tensors)
        held = optimizer_parameters(optimizer)
        for param in held:
            param.grad = None
        gradients = asked[0].tensors[len(request.changed_parameters) :]
        for number, gradient in zip(request.with_gradient, gradients, strict=True):
            self._parameters[number].grad = gradient
        before = [_settings(group) for group in optimizer.param_groups]
        attributes = self._attributes(optimizer).pack()
        with preserve_rng_state():
            if request.random_state is not None:
                request.random_state.restore()
            optimizer.step()
        for param in held:
            param.grad = None
        changed = [
            _changed_settings(_settings(group), known)
            for group, known in zip(optimizer.param_groups, before, strict=True)
        ]
        body = changed, bool(optimizer.state), self._changed_attributes(optimizer, attributes)
        return Message("done", body, [param.detach() for param in held])

    def _log_for_undo(self, request: OptimizerRequest) -> None:
        optimizer = self._optimizers[request.number]
        self._undo_log.log_change(optimizer, request.undo_point)

    def _update_optimizer(
        self, request: OptimizerRequest, tensors: Sequence[torch.Tensor]
    ) -> Optimizer:
        """Apply the changes that the workers' loops made to the optimizer of a request.

        Loops and their schedulers change settings, add groups, write to weights and freeze them.
        """
        for number, value in zip(request.changed_parameters, tensors, strict=False):
            # The object stays: the optimizer's state belongs to it.
            self._parameter(number).data = value.clone()
        optimizer = self._optimizers[request.number]
        known, frozen = optimizer.param_groups, set(request.frozen)
        del known[len(request.groups) :]
        for place, (settings, numbers) in enumerate(request.groups):
            if place == len(known):
                known.append({})
            known[place].update(settings)
            known[place]["params"] = [self._parameter(number) for number in numbers]
            for number in numbers:
                self._parameter(number).requires_grad_(number not in frozen)
        self._attributes(optimizer).put(request.attributes)
        return optimizer

    def _attributes(self, optimizer: Optimizer) -> OptimizerAttributes:
        held = set(map(id, optimizer_parameters(optimizer)))
        params = {number: p for number, p in self._parameters.items() if id(p) in held}
        return OptimizerAttributes(optimizer, params)

    def _changed_attributes(self, optimizer: Optimizer, before: Packed) -> Changes:
        changes = changes_between(before, self._attributes(optimizer).pack())
        return {k: packed for k, packed in changes.items() if not isinstance(packed, NotSent)}

    def _common_attributes(self, request: OptimizerRequest, by_rank: Sequence[Changes]) -> Changes:
        """The changes of attributes that are alike on all ranks.

        An attribute that the optimizer has here, and that ranks have set to different values, is
        refused: a step may read it. One that the ranks have made since for themselves (a loss to
        log) stays with each.
        """
        if all(changes == by_rank[0] for changes in by_rank):
            return by_rank[0]
        own = self._attributes(self._optimizers[request.number])
        # A function, say, has another pickle on every rank.
        shown = [
            {key: data and _comparable_value(own.load(data)) for key, data in changes.items()}
            for changes in by_rank
        ]
        keys = set().union(*by_rank)
        apart = {key for key in keys if any(s.get(key, s) != shown[0].get(key, s) for s in shown)}
        here = apart & own.pack().keys()
        _refuse_different([{own.name_of(k): s[k] for k in sorted(here & s.keys())} for s in shown])
        return {key: data for key, data in by_rank[0].items() if key not in apart}

    def _parameter(self, number: int) -> torch.nn.Parameter:
        return self._parameters.setdefault(number, torch.nn.Parameter(torch.empty(0, device="cpu")))


def _in_words(message: Message) -> str:
    """The request for the error's text; equal where ranks ask for the same."""
    if message.kind == "attach":
        return "to begin"
    if message.kind == "all_reduce":
        (tensor,) = message.tensors
        return f"a reduction of {tensor.numel()} {tensor.dtype} numbers"
    return f"a step of optimizer {message.body.number}"


def _settings_in_words(groups: Groups) -> list[Any]:
    return [
        ({k: _comparable_value(v) for k, v in settings.items()}, numbers)
        for settings, numbers in groups
    ]


def _refuse_different(shown: Sequence[Any]) -> None:
    differ = [rank for rank, other in enumerate(shown) if other != shown[0]]
    if differ:
        raise ReplicasDifferError(
            "the ranks ask for different steps of one optimizer",
            where=f"rank {', '.join(map(str, differ))} against rank 0",
            expected=str(shown[0]),
            got=str(shown[differ[0]]),
            cause="a learning rate, a parameter group, an attribute of the optimizer or a mark of"
            " a parameter was changed on some ranks only",
            fix="change the optimizer, and optimizer.param_groups, in the same way on every rank",
        )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _changed_settings(settings: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The settings that a step has changed: an optimizer may find its own learning rate."""
    return {
        name: value
        for name, value in settings.items()
        if name not in before or _comparable_value(value) != _comparable_value(before[name])
    }


def _comparable_value(value: Any) -> Any:
    """A setting in a form that can be compared between ranks, and shown."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_comparable_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _comparable_value(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    # A function, say, is another object on every rank: only the types are compared.
    return value if isinstance(value, int | float | str | bool | None) else type(value).__name__


def _answer(act: Callable[[], Message]) -> Message:
    try:
        return act()
    # Whatever an optimizer of the user's raises belongs to the workers that wait for it.
    except Exception as error:
        return _refusal(error)


def _refusal(error: BaseException) -> Message:
    instead = WorkerFailedError(
        f"the parameter server raised {type(error).__name__}, which cannot travel", got=str(error)
    )
    return Message("error", dumps_exception(error, instead))


def _left_error(ranks: Sequence[int]) -> PeerLostError:
    return PeerLostError(
        "a worker waits at the parameter server for one that has left",
        got=f"rank {', '.join(map(str, ranks))} left",
        cause="another rank raised, or detached",
        fix="look for the first failure among the other ranks",
    )


def _out_of_step_error(texts: Sequence[str]) -> GradientNotReducedError:
    return GradientNotReducedError(
        "the ranks ask the parameter server for different things",
        expected="every rank in the same backward or step",
        got="; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts)),
        cause="one rank ran more backwards than another, or did not step its optimizer",
        fix="run the same backwards and steps on every rank; a rank with nothing to run backward"
        " through calls reduce_pending()",
    )


class InProcessServer:
    """A store in the process of its only worker, without a connection; see `Channel`."""

    def __init__(self) -> None:
        self._store = ParameterStore(1)

    def ask(self, message: Message) -> Message:
        """See `Channel`.

        Collective:
            None: there is one worker.
        """
        # Neither these tensors, if on the CPU, nor those of the answer are copied.
        message.tensors = [tensor.detach().cpu() for tensor in message.tensors]
        return raise_if_error(self._store.handle(0, message)[0])

    def close(self) -> None:
        """Do nothing: there is no connection."""
