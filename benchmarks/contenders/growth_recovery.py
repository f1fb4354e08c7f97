# SPDX-License-Identifier: Apache-2.0
"""What the death of one of 1 000 workers would cost the driver: its own code, no workers.

One actor stands for all survivors (see `crowd`). It leaves, and joins, as soon as it is asked; what
the driver asks, how it chooses the state that counts and whom it tells are the real ones.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import ray
from crowd import Crowd, CrowdEngine, cases, everybody
from lockstep.errors import WorkerDiedError
from lockstep.recovery.lost_worker import LostWorker
from lockstep.recovery.regrouping import Regrouping
from lockstep.recovery.watchdog import Watchdog
from lockstep.worker import SurvivorState
from lockstep.worker.survivor_state import RunPosition
from reporting import report

REPEATS = 5


def _measure(actor: Any, size: int, *, has_relays: bool) -> dict[str, Any]:
    cpu, wall = [], []
    before = ray.get(actor.num_asked.remote())
    for _ in range(REPEATS):
        engine = CrowdEngine(Crowd(actor, size, has_relays=has_relays))
        regrouping = Regrouping(engine, 1, Watchdog(engine.workers, 60, shadow_limit=3))
        first, died = engine.workers.lose_first(), WorkerDiedError("the first one died")
        lost = LostWorker(first, 0, range(1), died)
        started, cpu_before = time.perf_counter(), time.process_time()
        new_generation = regrouping.run("train", [lost])
        cpu.append(time.process_time() - cpu_before)
        wall.append(time.perf_counter() - started)
        if len(engine.workers.members) != size - 1 or len(new_generation.lost_workers) != 1:
            raise RuntimeError(f"{size - 1} survivors were expected")
        engine.workers.close_rendezvous()
    messages = 2 * (ray.get(actor.num_asked.remote()) - before) // REPEATS
    return {
        "workers": size,
        "relays": messages // 4 if has_relays else None,
        "cpu": 1000 * statistics.median(cpu),
        "wall": 1000 * statistics.median(wall),
        "messages": messages,
    }


def main() -> None:
    ray.init()
    survivor = SurvivorState(position=RunPosition(7, 0))
    actor = everybody({"leave_broken_group": survivor, "join": None})
    report(rows=[_measure(actor, number, has_relays=relays) for number, relays in cases()])


if __name__ == "__main__":
    main()
