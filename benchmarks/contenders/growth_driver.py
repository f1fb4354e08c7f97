# SPDX-License-Identifier: Apache-2.0
"""What 1 000 workers would cost the driver: its own code and real messages, no workers.

One actor stands for all of them and answers every call at once with what a worker would report.
The driver's calls, its wait, its reading of the answers and the merge are the real ones.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import cloudpickle

import ray
from classifier import Classifier
from lockstep import TorchTrainer
from lockstep.engine import PoolStatus
from lockstep.engine.pending_call import PendingCall
from lockstep.metrics import AverageMeterCollection
from lockstep.serialization import dumps_or_refuse
from lockstep.worker import LoopRequest, Outcome, Report, StartReport
from reporting import report

if TYPE_CHECKING:
    from lockstep.engine.engine_protocol import CallListener
    from lockstep.worker import RemoteCall, Worker

WORKERS = (2, 10, 100, 1_000)
REPEATS = 5


def _report() -> Report:
    """What a worker brings back from an epoch of the default loop."""
    meters = AverageMeterCollection()
    for step in range(10):
        meters.update({"train_loss": 1 / (step + 1)}, n=32)
    summary = meters.summary()
    return Report(
        metrics=[dict(summary)],
        summaries=[summary],
        sums=meters.state(),
        samples_by_pass=[320],
        samples=320,
        steps=10,
        epoch=1,
        timers=None,
    )


class Everybody:
    """Answers for every rank."""

    def __init__(self) -> None:
        self._value = cloudpickle.dumps(_report())

    def perform(self, method: bytes, arguments: bytes) -> Outcome:
        return Outcome(value=self._value)


class Standing:
    """An `Engine` whose workers are all that one actor."""

    def __init__(self, actor: Any, num_workers: int) -> None:
        self.ended_by: BaseException | None = None
        self.interrupted_by: BaseException | None = None
        self.start_reports = [StartReport(0, "cpu", {"train": 10})] * num_workers
        self._actor = actor

    def call(
        self,
        call: RemoteCall[Worker, Any],
        *,
        listener: CallListener | None = None,
        retries: int = 3,
    ) -> list[Any]:
        arguments = dumps_or_refuse((call.args, call.kwargs), "arguments")
        pending_call: PendingCall[Any] = PendingCall(call.contract, outlives_deaths=False)
        for rank in range(len(self.start_reports)):
            method = cloudpickle.dumps(call.method)
            pending_call.pending[self._actor.perform.remote(method, arguments)] = rank
        pending_call.wait(None)
        return [pending_call.values[rank] for rank in range(len(self.start_reports))]

    def status(self) -> PoolStatus:
        return PoolStatus(workers=len(self.start_reports))

    def close(self, *, force: bool) -> None:
        pass


def _measure(actor: Any, num_workers: int) -> dict[str, float]:
    trainer = TorchTrainer(training_operator_cls=Classifier, config={"num_steps": 1})
    trainer._workers.open_engine().close(force=False)
    trainer._workers._engine = Standing(actor, num_workers)
    trainer.train()
    cpu, wall = [], []
    for _ in range(REPEATS):
        started, cpu_before = time.perf_counter(), time.process_time()
        trainer.train()
        cpu.append(time.process_time() - cpu_before)
        wall.append(time.perf_counter() - started)
    trainer.shutdown()
    arguments = len(dumps_or_refuse(((LoopRequest("train", None, False, {}),), {}), "arguments"))
    answer = len(cloudpickle.dumps(Outcome(value=cloudpickle.dumps(_report()))))
    return {
        "workers": num_workers,
        "cpu": 1000 * statistics.median(cpu),
        "wall": 1000 * statistics.median(wall),
        "messages": 2 * num_workers,
        "kibibytes": num_workers * (arguments + answer) / 1024,
    }


def main() -> None:
    ray.init()
    actor = ray.remote(num_cpus=1)(Everybody).remote()
    report(rows=[_measure(actor, count) for count in WORKERS])


if __name__ == "__main__":
    main()
