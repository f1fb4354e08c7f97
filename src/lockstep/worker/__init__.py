# SPDX-License-Identifier: Apache-2.0
"""One worker's life: process group, shards, the commit of a step."""

from lockstep.worker.call_outcome import Outcome, add_rank, failure, is_peer_lost, shown_error
from lockstep.worker.data_position import items_ahead, position, samples_of
from lockstep.worker.group_formation import (
    Formation,
    SurvivorState,
    go_back_alone,
    join,
    stand_down,
)
from lockstep.worker.loop_run import LoopProgress, LoopRequest
from lockstep.worker.parity_trial import Trial, verify
from lockstep.worker.prediction import Predicted, predict
from lockstep.worker.process_group import Rendezvous, arrival_key
from lockstep.worker.progress import ProgressReport, progress_of, rows_after
from lockstep.worker.remote_method import (
    CallContract,
    Communication,
    OnFailure,
    RemoteCall,
    RemoteMethod,
)
from lockstep.worker.report import Counted, Report, StartReport, lost_report
from lockstep.worker.snapshot import Snapshot
from lockstep.worker.spec import WorkerSpec
from lockstep.worker.torch_profiler import start_tracing, stop_tracing
from lockstep.worker.worker import Worker
from lockstep.worker.worker_status import WorkerStatus, status_of

__all__ = [
    "CallContract",
    "Communication",
    "Counted",
    "Formation",
    "LoopProgress",
    "LoopRequest",
    "OnFailure",
    "Outcome",
    "Predicted",
    "ProgressReport",
    "RemoteCall",
    "RemoteMethod",
    "Rendezvous",
    "Report",
    "Snapshot",
    "StartReport",
    "SurvivorState",
    "Trial",
    "Worker",
    "WorkerSpec",
    "WorkerStatus",
    "add_rank",
    "arrival_key",
    "failure",
    "go_back_alone",
    "is_peer_lost",
    "items_ahead",
    "join",
    "lost_report",
    "position",
    "predict",
    "progress_of",
    "rows_after",
    "samples_of",
    "shown_error",
    "stand_down",
    "start_tracing",
    "status_of",
    "stop_tracing",
    "verify",
]
