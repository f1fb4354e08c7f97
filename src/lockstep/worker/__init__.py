# SPDX-License-Identifier: Apache-2.0
"""One rank of a run: remote methods, process group, position in the data, undo of a step."""

from lockstep.worker.call_outcome import Outcome, add_rank, failed_outcome, is_peer_lost
from lockstep.worker.checkpoint_calls import begin_load, hold_part, read_rows, receive_state
from lockstep.worker.checkpoint_part import PartOnDisk
from lockstep.worker.group_rejoin import (
    Formation,
    join,
    leave_broken_group,
    undo_without_peers,
)
from lockstep.worker.loop_run import LoopProgress, LoopRequest
from lockstep.worker.memory_recovery import (
    StateRestore,
    find_restore,
    find_restores_on_disk,
    renew_memory_checkpoint,
    replay,
)
from lockstep.worker.parity_trial import Trial, verify
from lockstep.worker.per_rank_state import add_every_rank
from lockstep.worker.position_queries import items_ahead, run_counts, samples_of, steps_per_epoch
from lockstep.worker.prediction import Prediction, predict
from lockstep.worker.process_group import Rendezvous, arrival_key
from lockstep.worker.progress import ProgressReport, progress_of, rows_after
from lockstep.worker.remote_method import (
    CallContract,
    Communication,
    OnFailure,
    RemoteCall,
    RemoteMethod,
)
from lockstep.worker.report import (
    LoopCounts,
    PassResult,
    Report,
    StartReport,
    report_of_lost_worker,
)
from lockstep.worker.snapshot import CheckpointOnDisk, Snapshot
from lockstep.worker.spec import WorkerSpec
from lockstep.worker.state_dict import load_parts
from lockstep.worker.step_records import module_prefix, weight_names, weight_slots
from lockstep.worker.survivor_state import RunPosition, SurvivorState
from lockstep.worker.torch_profiler import discard_trace, start_tracing, stop_tracing
from lockstep.worker.worker import Worker
from lockstep.worker.worker_status import WorkerStatus, status_of

__all__ = [
    "CallContract",
    "CheckpointOnDisk",
    "Communication",
    "Formation",
    "LoopCounts",
    "LoopProgress",
    "LoopRequest",
    "OnFailure",
    "Outcome",
    "PartOnDisk",
    "PassResult",
    "Prediction",
    "ProgressReport",
    "RemoteCall",
    "RemoteMethod",
    "Rendezvous",
    "Report",
    "RunPosition",
    "Snapshot",
    "StartReport",
    "StateRestore",
    "SurvivorState",
    "Trial",
    "Worker",
    "WorkerSpec",
    "WorkerStatus",
    "add_every_rank",
    "add_rank",
    "arrival_key",
    "begin_load",
    "discard_trace",
    "failed_outcome",
    "find_restore",
    "find_restores_on_disk",
    "hold_part",
    "is_peer_lost",
    "items_ahead",
    "join",
    "leave_broken_group",
    "load_parts",
    "module_prefix",
    "predict",
    "progress_of",
    "read_rows",
    "receive_state",
    "renew_memory_checkpoint",
    "replay",
    "report_of_lost_worker",
    "rows_after",
    "run_counts",
    "samples_of",
    "start_tracing",
    "status_of",
    "steps_per_epoch",
    "stop_tracing",
    "undo_without_peers",
    "verify",
    "weight_names",
    "weight_slots",
]
