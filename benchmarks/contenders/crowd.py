# SPDX-License-Identifier: Apache-2.0
"""Workers that are simulated: one actor stands for all of them, and answers at once.

What the driver sends, how it waits, what it reads and concludes are the real ones. Where the
workers have names the driver reaches them through relays, whose answers the actor gives as well.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cloudpickle

import ray
from lockstep.engine import Resources
from lockstep.engine.call_relay import RANKS_PER_RELAY
from lockstep.engine.cluster import session, this_node
from lockstep.engine.ray_engine import RayEngine
from lockstep.engine.worker_group import WorkerGroup
from lockstep.engine.worker_handle import WorkerHandle
from lockstep.worker import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockstep.worker import RemoteMethod, Worker


NUMBERS = (2, 10, 100, 1_000)


def cases() -> list[tuple[int, bool]]:
    """Numbers of workers (those of the command line, if any), and whether there are relays."""
    numbers = [int(each) for each in sys.argv[1:]] or NUMBERS
    return [
        *((number, False) for number in numbers),
        *((number, True) for number in numbers if number >= 2 * RANKS_PER_RELAY),
    ]


class Everybody:
    """Answers for every worker, and for every relay.

    Args:
        answers: the pickled result of each remote method, by its name.
    """

    def __init__(self, answers: Mapping[str, bytes]) -> None:
        self._answers = answers
        self._asked = 0

    def perform(self, method: bytes, arguments: bytes, number: int) -> Outcome:
        self._asked += 1
        called: RemoteMethod[Worker, ..., object] = cloudpickle.loads(method)
        return Outcome(value=self._answers[called.contract.name])

    def relay(
        self, names: Sequence[str], method: bytes, arguments: bytes, number: int
    ) -> list[Outcome]:
        self._asked += 1
        called: RemoteMethod[Worker, ..., object] = cloudpickle.loads(method)
        return [Outcome(value=self._answers[called.contract.name]) for _ in names]

    def num_asked(self) -> int:
        return self._asked


def everybody(answers: Mapping[str, object]) -> Any:
    """The actor, which has these results of remote methods."""
    pickled = {name: cloudpickle.dumps(answer) for name, answer in answers.items()}
    return ray.remote(num_cpus=1)(Everybody).remote(pickled)


class Crowd(WorkerGroup):
    """`size` workers all of which are that one actor, but for the first, of which there is none."""

    def __init__(self, actor: Any, size: int, *, has_relays: bool) -> None:
        self.members = [
            WorkerHandle(
                number, this_node(), number, actor, name=f"worker{number}" if has_relays else ""
            )
            for number in range(size)
        ]
        self.spares = []
        self.generation = 0
        self._session = session()
        self._resources = Resources(1, None, "gloo", timeout_s=60)
        self._use_local = False
        self._store = self.server = self._pool = None

    def lose_first(self) -> WorkerHandle:
        """Let the first worker be dead."""
        first = self.members[0]
        first.actor = None  # no process of its own that could be ended
        return first


class CrowdEngine(RayEngine):
    """An engine of these workers."""

    def __init__(self, workers: Crowd) -> None:
        self.workers = workers
        size = len(workers.members)
        self.spec = SimpleNamespace(
            num_workers=size, num_shards=size, log_every=0, keeps_memory_checkpoints=False
        )
        self.ended_by = None
        self._fetcher = self._keeper = None
