# SPDX-License-Identifier: Apache-2.0
"""`remote_method`: marks the functions of a worker that the driver may call.

A remote method is a method of `Worker`, or a function whose first argument is the worker, decorated
with `remote_method`. The decorator says, at the function, how ranks wait for each other in it and
what follows a failure. The driver names the function itself::

    engine.call(Worker.train.with_args(request))  # a list with a Report of each rank
    engine.call_rank(0, run_counts.with_args())

so a misspelt method, argument or result is an error of the type checker, and an editor goes to the
definition. A call crosses processes as the function's module and qualified name, and its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import update_wrapper
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    cast,
    overload,
)

from lockstep.worker.loop_run import LoopRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.worker.loop_run import LoopProgress

W = TypeVar("W", contravariant=True)
R = TypeVar("R", covariant=True)
P = ParamSpec("P")


class Communication(Enum):
    """How ranks wait for each other inside a remote method."""

    NONE = auto()
    """No rank waits for another: when one fails, the others finish on their own."""

    SHARDED_STATE = auto()
    """As NONE, but as RUN_GROUP under ``sync="fsdp"``, where weights are in shards."""

    OWN_STATE = auto()
    """As NONE, but as RUN_GROUP under ``sync="fsdp"`` where the user's own `state_dict` may return
    shards, which are gathered."""

    RUN_GROUP = auto()
    """Ranks wait for each other in the run's process group: a failure of one breaks the group."""

    OWN_GROUP = auto()
    """Ranks wait for each other in a group that the method forms; a rank that fails closes it."""

    UNKNOWN = auto()
    """The user's function decides."""


class OnFailure(Enum):
    """What the driver does when a worker died in the middle of a remote method, or Ctrl-C came."""

    RESUME = auto()
    """The loop goes on from the last committed step. It may be interrupted."""

    REPEAT = auto()
    """The method changes nothing: it is called again. It may be interrupted."""

    REPEAT_WRITE = auto()
    """The method writes the same values again: it is called again. Interrupted in the middle, it
    leaves a state that is neither the old nor the new one, so the workers end."""

    RAISE = auto()
    """The method may have happened on some workers: the caller has to look. Interrupted in the
    middle, it ends the workers."""


@dataclass(frozen=True)
class CallContract:
    """How ranks wait for each other in a remote method, and what follows a failure.

    Attributes:
        name: the name of the method in messages.
        communication: how ranks wait for each other in it.
        on_failure: what follows a failure in it.
        is_timed: a rank for which others wait is at fault after `hang_timeout_s` without a step.
            False for a function of the user's own or a copy of a large model, which may take any
            time.
    """

    name: str
    communication: Communication
    on_failure: OnFailure
    is_timed: bool = False

    @property
    def may_be_repeated(self) -> bool:
        """Whether the call goes on, or is made again, after a death."""
        return self.on_failure is not OnFailure.RAISE

    @property
    def may_be_interrupted(self) -> bool:
        """Whether workers that leave in the middle of it can go back to the last committed step."""
        return self.on_failure in (OnFailure.RESUME, OnFailure.REPEAT)


@dataclass(frozen=True)
class RemoteCall(Generic[W, R]):
    """A remote method with its arguments, ready to be sent."""

    method: RemoteMethod[W, ..., R]
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)

    @property
    def contract(self) -> CallContract:
        return self.method.contract

    def perform(self, worker: W) -> R:
        """Call the method on `worker`, in its process."""
        return self.method(worker, *self.args, **self.kwargs)

    @property
    def request(self) -> LoopRequest | None:
        """The request of a call of `train` or `validate`; None for others."""
        return next((each for each in self.args if isinstance(each, LoopRequest)), None)

    @property
    def purpose(self) -> str | None:
        """The purpose of a call of `train` or `validate` (see `LoopRequest`); None for others."""
        return None if self.request is None else self.request.purpose

    @property
    def is_training(self) -> bool:
        """Whether the call is one of `train`."""
        return self.purpose == "train"

    def may_change_state(self, *, in_validation: bool) -> bool:
        """Whether the call may change the state of the run by something else than training.

        Args:
            in_validation: a validation may.
        """
        if self.contract.on_failure is OnFailure.RESUME:
            return in_validation and not self.is_training
        return self.contract.on_failure is not OnFailure.REPEAT

    def resume_at(self, progress: LoopProgress) -> Self:
        """The same loop, for workers that have come as far as `progress` before a failure."""
        return replace(
            self,
            args=tuple(
                replace(each, interrupted_at=progress) if isinstance(each, LoopRequest) else each
                for each in self.args
            ),
        )


class RemoteMethod(Generic[W, P, R]):
    """A function of a worker that the driver may call; see `remote_method`.

    It behaves as the function that it wraps: called with a worker, or bound by ``worker.method``.

    Attributes:
        contract: what the driver knows of it.
    """

    __qualname__: str

    def __init__(self, function: Callable[Concatenate[W, P], R], contract: CallContract) -> None:
        self._function = function
        self.contract = contract
        update_wrapper(cast("Callable[..., Any]", self), function)

    def __call__(self, worker: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(worker, *args, **kwargs)

    def with_args(self, *args: P.args, **kwargs: P.kwargs) -> RemoteCall[W, R]:
        """A call with these arguments, for an engine; nothing happens yet."""
        return RemoteCall(self, args, kwargs)

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...

    @overload
    def __get__(self, instance: W, owner: type[Any]) -> Callable[P, R]: ...

    def __get__(self, instance: W | None, owner: type[Any]) -> Self | Callable[P, R]:
        if instance is None:
            return self
        return cast("Callable[P, R]", MethodType(self._function, instance))

    def __reduce__(self) -> str:
        # pickle sends a reference: this object is found again under its name in its module.
        return self.__qualname__


def remote_method(
    communication: Communication, on_failure: OnFailure, *, is_timed: bool = False
) -> Callable[[Callable[Concatenate[W, P], R]], RemoteMethod[W, P, R]]:
    """Make a method of `Worker`, or a function of a worker, one that the driver may call.

    Args:
        communication, on_failure, is_timed: see `CallContract`.
    """

    def decorate(function: Callable[Concatenate[W, P], R]) -> RemoteMethod[W, P, R]:
        contract = CallContract(function.__name__, communication, on_failure, is_timed)
        return RemoteMethod(function, contract)

    return decorate
