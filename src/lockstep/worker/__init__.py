# SPDX-License-Identifier: Apache-2.0
"""One worker's life: process group, shards, the commit of a step."""

from lockstep.worker.call_outcome import Outcome, add_rank, failure, is_peer_lost, shown_error
from lockstep.worker.group_formation import Formation, SurvivorState
from lockstep.worker.loop_run import LoopProgress
from lockstep.worker.parity_trial import Trial
from lockstep.worker.prediction import Predicted
from lockstep.worker.process_group import Rendezvous, arrival_key
from lockstep.worker.profiling import start_tracing, stop_tracing
from lockstep.worker.report import Counted, Report, lost_report
from lockstep.worker.snapshot import Snapshot
from lockstep.worker.spec import WorkerSpec
from lockstep.worker.worker import Worker
from lockstep.worker.worker_status import WorkerStatus

__all__ = [
    "Counted",
    "Formation",
    "LoopProgress",
    "Outcome",
    "Predicted",
    "Rendezvous",
    "Report",
    "Snapshot",
    "SurvivorState",
    "Trial",
    "Worker",
    "WorkerSpec",
    "WorkerStatus",
    "add_rank",
    "arrival_key",
    "failure",
    "is_peer_lost",
    "lost_report",
    "shown_error",
    "start_tracing",
    "stop_tracing",
]
