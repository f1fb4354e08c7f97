# SPDX-License-Identifier: Apache-2.0
"""The one owner of parameters and optimizers, to whom workers send gradients.

It knows no model and computes no loss. It answers one request after the other; what all
workers have to take part in it answers when all have asked, so that a worker that does
something else than its peers is found out and not waited for.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from lockstep.errors import (
    GradientNotReducedError,
    PeerLostError,
    ReplicasDifferError,
    WorkerFailedError,
)
from lockstep.serialization import dumps_exception
from lockstep.sync.parameter_server.messages import Message, checked
from lockstep.sync.parameter_server.optimizer_undo_log import OptimizerUndoLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

_TOGETHER = frozenset({"add", "step"})
_TAKING_OVER = frozenset({"adopt", "inherit"})
_LOW_PRECISION = (torch.float16, torch.bfloat16)

Groups = list[tuple[dict[str, Any], list[int]]]
"""An optimizer's parameter groups: their settings, and the numbers of their parameters."""


class ParameterStore:
    """Parameters and optimizers of `size` workers.

    Requests, by the word they begin with:

    - "adopt": take over parameters and optimizers (rank 0 alone).
    - "inherit": go on with those of the generation before (rank 0 alone), without what no worker
      that is left has counted; answer with the weights.
    - "add": answer with the sum over the ranks, added in their order.
    - "step": let an optimizer step with rank 0's gradients; answer with the new weights, and with
      the settings that it changed.
    - "state", "load": read or replace the state of an optimizer, once it has been taken over.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._asked: dict[int, Message] = {}
        # Who asks for what rank 0, who may be the slower one, has not handed over yet.
        self._early: dict[int, Message] = {}
        self._has_taken_over = False
        self._gone: set[int] = set()
        self._parameters: dict[int, torch.nn.Parameter] = {}
        self._optimizers: list[Optimizer] = []
        self._undo_log = OptimizerUndoLog()

    def succeeded_by(self, size: int) -> ParameterStore:
        """The owner for another generation of `size` workers: same parameters, same optimizers."""
        successor = ParameterStore(size)
        successor._parameters, successor._optimizers = self._parameters, self._optimizers
        successor._undo_log = self._undo_log
        return successor

    @property
    def is_idle(self) -> bool:
        """No worker waits for another one."""
        return not self._asked and not self._early

    def leave(self, rank: int) -> None:
        """Rank `rank` asks for nothing any more."""
        self._gone.add(rank)

    def handle(self, rank: int, message: Message) -> dict[int, Message]:
        """Take a request of rank `rank`; returns the answers that are due now, by rank."""
        if message.what not in _TOGETHER:
            return self._in_turn(rank, message)
        self._asked[rank] = message
        if self._gone:
            everyone, self._asked = list(self._asked), {}
            return dict.fromkeys(everyone, _refusal(_left(sorted(self._gone))))
        if len(self._asked) < self._size:
            return {}
        asked, self._asked = [self._asked[each] for each in range(self._size)], {}
        return dict.fromkeys(range(self._size), self._answer(lambda: self._together(asked)))

    def _in_turn(self, rank: int, message: Message) -> dict[int, Message]:
        """Answer a request of `rank` alone, and those that had to wait for it."""
        if not self._has_taken_over and message.what not in _TAKING_OVER:
            if 0 in self._gone:
                return {rank: _refusal(_left([0]))}
            self._early[rank] = message
            return {}
        answers = {rank: self._answer(lambda: self._alone(message))}
        if self._has_taken_over:
            early, self._early = self._early, {}
            for other, request in early.items():
                answers[other] = self._answer(partial(self._alone, request))
        return answers

    def _answer(self, act: Callable[[], Message]) -> Message:
        try:
            return act()
        # Whatever an optimizer of the user's raises belongs to the workers that wait for it.
        except Exception as error:
            return _refusal(error)

    def _alone(self, message: Message) -> Message:
        if message.what == "adopt":
            self._parameters, optimizers = pickle.loads(message.about)
            for optimizer, further in optimizers:
                vars(optimizer).update(further)
                self._optimizers.append(optimizer)
            self._has_taken_over = True
            return Message("done")
        if message.what == "inherit":
            self._undo_log.return_to(message.about)
            self._has_taken_over = True
            weights = [param.detach() for param in self._parameters.values()]
            return Message("done", list(self._parameters), weights)
        if message.what == "load":
            self._keep(message)
            self._prepared(message).load_state_dict(message.about["state"])
            return Message("done")
        return Message("done", cloudpickle.dumps(self._prepared(message).state_dict()))

    def _together(self, asked: Sequence[Message]) -> Message:
        kinds = [_kind(message) for message in asked]
        if any(kind != kinds[0] for kind in kinds):
            raise _out_of_step(kinds)
        return self._add(asked) if asked[0].what == "add" else self._step(asked)

    def _add(self, asked: Sequence[Message]) -> Message:
        """The sum over the ranks of what they sent, in rank order.

        Gradient:
            Added, not divided: what it counts travels behind the gradients.

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
        _compare_settings([message.about["groups"] for message in asked])
        about = asked[0].about
        self._keep(asked[0])
        optimizer = self._prepared(asked[0])
        held = [param for group in optimizer.param_groups for param in group["params"]]
        for param in held:
            param.grad = None
        gradients = asked[0].tensors[len(about["weights"]) :]
        for number, gradient in zip(about["with_gradient"], gradients, strict=True):
            self._parameters[number].grad = gradient
        before = [_settings(group) for group in optimizer.param_groups]
        optimizer.step()
        for param in held:
            param.grad = None
        changed = [
            _changed(_settings(group), known)
            for group, known in zip(optimizer.param_groups, before, strict=True)
        ]
        return Message("done", changed, [param.detach() for param in held])

    def _keep(self, message: Message) -> None:
        """Copy what is about to change, if the workers may come back to it."""
        optimizer = self._optimizers[message.about["number"]]
        self._undo_log.about_to_change(optimizer, message.about["may_go_back_to"])

    def _prepared(self, message: Message) -> Optimizer:
        """The optimizer that a request is about, with what the workers' loops did to it.

        They, and their schedulers, change settings, add groups, and write to weights.
        """
        numbers = message.about["weights"]
        for number, value in zip(numbers, message.tensors, strict=False):
            # The object stays: the optimizer's state belongs to it.
            self._parameter(number).data = value.clone()
        optimizer: Optimizer = self._optimizers[message.about["number"]]
        self._regroup(optimizer, message.about["groups"])
        return optimizer

    def _parameter(self, number: int) -> torch.nn.Parameter:
        return self._parameters.setdefault(number, torch.nn.Parameter(torch.empty(0, device="cpu")))

    def _regroup(self, optimizer: Optimizer, groups: Groups) -> None:
        known = optimizer.param_groups
        del known[len(groups) :]
        for place, (settings, numbers) in enumerate(groups):
            if place == len(known):
                known.append({})
            known[place].update(settings)
            known[place]["params"] = [self._parameter(number) for number in numbers]


def _kind(message: Message) -> str:
    if message.what == "add":
        (tensor,) = message.tensors
        return f"a reduction of {tensor.numel()} {tensor.dtype} numbers"
    return f"a step of optimizer {message.about['number']}"


def _compare_settings(by_rank: Sequence[Groups]) -> None:
    shown = [
        [({k: _plain(v) for k, v in settings.items()}, numbers) for settings, numbers in groups]
        for groups in by_rank
    ]
    differ = [rank for rank, other in enumerate(shown) if other != shown[0]]
    if differ:
        raise ReplicasDifferError(
            "the ranks ask for different steps of one optimizer",
            where=f"rank {', '.join(map(str, differ))} against rank 0",
            expected=str(shown[0]),
            got=str(shown[differ[0]]),
            cause="a learning rate, or a parameter group, was changed on some ranks only",
            fix="change optimizer.param_groups in the same way on every rank",
        )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _changed(settings: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer that adapts its own settings (a learning rate that it finds) has set."""
    return {
        name: value
        for name, value in settings.items()
        if name not in before or _plain(value) != _plain(before[name])
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # What has no value of its own (a function) is another object on every rank.
    return value if isinstance(value, int | float | str | bool | None) else type(value).__name__


def _refusal(error: BaseException) -> Message:
    instead = WorkerFailedError(
        f"the parameter server raised {type(error).__name__}, which cannot travel", got=str(error)
    )
    return Message("error", dumps_exception(error, instead))


def _left(ranks: Sequence[int]) -> PeerLostError:
    return PeerLostError(
        "a worker waits at the parameter server for one that has left",
        got=f"rank {', '.join(map(str, ranks))} left",
        cause="another rank raised, or detached",
        fix="look for the first failure among the other ranks",
    )


def _out_of_step(kinds: Sequence[str]) -> GradientNotReducedError:
    return GradientNotReducedError(
        "the ranks ask the parameter server for different things",
        expected="every rank in the same backward or step",
        got="; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds)),
        cause="one rank ran more backwards than another, or did not step its optimizer",
        fix="run the same backwards and steps on every rank; a rank with nothing to run backward"
        " through calls reduce_pending()",
    )


class InProcessServer:
    """An owner in the process of its only worker; see `Channel`."""

    def __init__(self) -> None:
        self._owner = ParameterStore(1)

    def ask(self, message: Message) -> Message:
        """See `Channel`.

        Collective:
            None: there is one worker.
        """
        # Not copied where they are on the CPU already, as the owner's own are.
        message.tensors = [tensor.detach().cpu() for tensor in message.tensors]
        return checked(self._owner.handle(0, message)[0])

    def close(self) -> None:
        """Nothing to leave."""
