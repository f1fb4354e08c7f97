# SPDX-License-Identifier: Apache-2.0
"""What the death of one of 1 000 workers would cost the driver: its own code, no workers.

One actor stands for all survivors. It leaves, and joins, as soon as it is asked; what the driver
asks, how it chooses the state that counts and whom it tells are the real ones.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

import cloudpickle

import ray
from lockstep.engine import Resources
from lockstep.engine.cluster import this_node
from lockstep.engine.ray_engine import RayEngine
from lockstep.engine.worker_group import WorkerGroup
from lockstep.engine.worker_handle import WorkerHandle
from lockstep.errors import WorkerDiedError
from lockstep.recovery.lost_worker import LostWorker
from lockstep.recovery.regrouping import Regrouping
from lockstep.recovery.watchdog import Watchdog
from lockstep.worker import Outcome, SurvivorState, join, leave_broken_group
from reporting import report

WORKERS = (2, 10, 100, 1_000)
REPEATS = 5


class Everybody:
    """Answers for every survivor."""

    def __init__(self) -> None:
        self._answers = {
            leave_broken_group.contract: cloudpickle.dumps(SurvivorState(point=(7, 0))),
            join.contract: cloudpickle.dumps(None),
        }
        self.asked = 0

    def perform(self, method: bytes, arguments: bytes) -> Outcome:
        self.asked += 1
        return Outcome(value=self._answers[cloudpickle.loads(method).contract])

    def count(self) -> int:
        return self.asked


class Crowd(WorkerGroup):
    """Workers all of which are that one actor."""

    def __init__(self, actor: Any, size: int) -> None:
        self.members = [WorkerHandle(number, this_node(), number, actor) for number in range(size)]
        self.spares = []
        self._resources = Resources(1, None, "gloo", timeout_s=60)
        self._use_local = False
        self._store = self.server = self._pool = None


class CrowdEngine(RayEngine):
    """An engine of these workers."""

    def __init__(self, actor: Any, size: int) -> None:
        self.workers = Crowd(actor, size)
        self.spec = SimpleNamespace(num_workers=size, num_shards=size, log_every=0)
        self._fetcher = None

    def _check_session(self) -> None:
        pass


def _measure(actor: Any, size: int) -> dict[str, float]:
    cpu, wall = [], []
    before = ray.get(actor.count.remote())
    for _ in range(REPEATS):
        engine = CrowdEngine(actor, size)
        regrouping = Regrouping(engine, 1, Watchdog(engine.workers, 60))
        first, died = engine.workers.members[0], WorkerDiedError("the first one died")
        lost = LostWorker(first, 0, range(1), died)
        started, cpu_before = time.perf_counter(), time.process_time()
        regrouped = regrouping.run("train", [lost])
        cpu.append(time.process_time() - cpu_before)
        wall.append(time.perf_counter() - started)
        if regrouped.size != size - 1:
            raise RuntimeError(f"{size - 1} survivors were expected, not {regrouped.size}")
        engine.workers.close_rendezvous()
    messages = 2 * (ray.get(actor.count.remote()) - before) / REPEATS
    return {
        "workers": size,
        "cpu": 1000 * statistics.median(cpu),
        "wall": 1000 * statistics.median(wall),
        "messages": messages,
    }


def main() -> None:
    ray.init()
    actor = ray.remote(num_cpus=1)(Everybody).remote()
    report(rows=[_measure(actor, size) for size in WORKERS])


if __name__ == "__main__":
    main()
