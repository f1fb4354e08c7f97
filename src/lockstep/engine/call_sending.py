# SPDX-License-Identifier: Apache-2.0
"""`send_call`: sends ranks in actors their call of a remote method, directly or through relays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import cloudpickle

import ray
from lockstep.engine.call_relay import next_call_number, relay_groups
from lockstep.errors import WorkerDiedError
from lockstep.serialization import dumps_or_refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.engine.pending_call import PendingCall
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import Outcome, RemoteCall, Worker
    from ray import ObjectRef

R = TypeVar("R")

_LARGE_ARGUMENTS: Final = 100_000
"""Arguments of more bytes are put into Ray's object store once, and not into each message."""


def send_call(
    calls: Mapping[int, RemoteCall[Worker, R]],
    members: Sequence[WorkerHandle],
    pending_call: PendingCall[R],
    ranks_per_relay: int,
) -> None:
    """Send each rank in an actor its call; equal calls are pickled once.

    Args:
        calls: the call of each rank, all of the same method.
        members: the workers by rank.
        pending_call: gets the references of the answers.
        ranks_per_relay: see `relay_groups`.

    Raises:
        WorkerDiedError: there is no such rank. Nothing has been sent then.
    """
    for rank, call in calls.items():
        if rank >= len(members):
            raise _no_such_rank_error(call.contract.name, rank, len(members))
    method = cloudpickle.dumps(next(iter(calls.values())).method)
    arguments = _pickled_arguments(calls)
    # A recovery may change the members while the driver waits.
    workers, number = {rank: members[rank] for rank in calls}, next_call_number()

    def ask(rank: int) -> ObjectRef[Outcome]:
        actor = workers[rank].actor
        assert actor is not None, "the driver performs the call of its own rank"
        return actor.perform.remote(method, arguments[id(calls[rank])], number)

    ranks, names = list(calls), [worker.name for worker in workers.values()]
    alike = next(iter(arguments.values()))
    # Large arguments are an object of Ray's, which each worker fetches, whoever sends the call.
    may_relay = len(arguments) == 1 and isinstance(alike, bytes)
    groups = relay_groups(names, ranks_per_relay) if may_relay else []
    for group in groups:
        relay = workers[ranks[group[0]]].actor
        assert relay is not None, "it has a name"
        ref = relay.relay.remote([names[place] for place in group], method, alike, number)
        pending_call.relayed[ref] = [ranks[place] for place in group]
        pending_call.ask = ask
    for rank in ranks if not groups else ():
        if workers[rank].actor is not None:
            pending_call.pending[ask(rank)] = rank


def _pickled_arguments(
    calls: Mapping[int, RemoteCall[Worker, R]],
) -> dict[int, bytes | ObjectRef[bytes]]:
    """The pickled arguments of each different call, by its id."""
    pickled: dict[int, bytes | ObjectRef[bytes]] = {}
    for call in calls.values():
        if id(call) not in pickled:
            what = f"an argument of {call.contract.name}"
            arguments = dumps_or_refuse((call.args, call.kwargs), what)
            is_large = len(arguments) > _LARGE_ARGUMENTS
            pickled[id(call)] = ray.put(arguments) if is_large else arguments
    return pickled


def _no_such_rank_error(method: str, rank: int, size: int) -> WorkerDiedError:
    return WorkerDiedError(
        f"{method} was for a rank that is no more",
        where=f"rank {rank}",
        got=f"{size} workers",
        cause="a worker has died, and no other one has its place",
    )
