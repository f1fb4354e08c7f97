# SPDX-License-Identifier: Apache-2.0
"""What 1 000 workers would cost the driver in an epoch: its own code and real messages, no workers.

One actor stands for all of them and answers every call at once with what a worker would report
(see `crowd`). The merge of the reports is the real one.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import cloudpickle

import ray
from classifier import Classifier
from crowd import Crowd, CrowdEngine, cases, everybody
from lockstep import TorchTrainer
from lockstep.metrics import AverageMeterCollection
from lockstep.serialization import dumps_or_refuse
from lockstep.worker import LoopRequest, Outcome, PassResult, Report, StartReport
from reporting import report

REPEATS = 5


def _report() -> Report:
    """What a worker brings back from an epoch of the default loop."""
    meters = AverageMeterCollection()
    for step in range(10):
        meters.update({"train_loss": 1 / (step + 1)}, n=32)
    one_pass = PassResult(meters.summary(), meters.state(), samples=320)
    return Report(
        passes=[one_pass],
        sums=meters.state(),
        samples=320,
        steps=10,
        epoch=1,
        timers=None,
    )


class Standing(CrowdEngine):
    """An engine that a trainer can use, of workers which have started."""

    def __init__(self, workers: Crowd) -> None:
        super().__init__(workers)
        self.start_reports = [StartReport(0, "cpu", {"train": 10})] * len(workers.members)

    def close(self, *, force: bool) -> None:
        pass


def _measure(actor: Any, num_workers: int, *, has_relays: bool) -> dict[str, Any]:
    trainer = TorchTrainer(training_operator_cls=Classifier, config={"num_steps": 1})
    trainer._workers.open_engine().close(force=False)
    trainer._workers._engine = Standing(Crowd(actor, num_workers, has_relays=has_relays))
    trainer.train()
    cpu, wall = [], []
    asked_before = ray.get(actor.num_asked.remote())
    for _ in range(REPEATS):
        started, cpu_before = time.perf_counter(), time.process_time()
        trainer.train()
        cpu.append(time.process_time() - cpu_before)
        wall.append(time.perf_counter() - started)
    messages = 2 * (ray.get(actor.num_asked.remote()) - asked_before) // REPEATS
    trainer.shutdown()
    arguments = len(dumps_or_refuse(((LoopRequest("train", None, False, {}),), {}), "arguments"))
    answer = len(cloudpickle.dumps(Outcome(value=cloudpickle.dumps(_report()))))
    return {
        "workers": num_workers,
        "relays": messages // 2 if has_relays else None,
        "cpu": 1000 * statistics.median(cpu),
        "wall": 1000 * statistics.median(wall),
        "messages": messages,
        "kibibytes": (messages / 2 * arguments + num_workers * answer) / 1024,
    }


def main() -> None:
    ray.init()
    actor = everybody({"train": _report()})
    report(rows=[_measure(actor, number, has_relays=relays) for number, relays in cases()])


if __name__ == "__main__":
    main()
