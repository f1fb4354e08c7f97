# SPDX-License-Identifier: Apache-2.0
"""One worker's life: process group, shards, the commit of a step."""

from lockstep.worker.outcome import Outcome, add_rank, failure, is_peer_lost, shown_error
from lockstep.worker.passes import Progress
from lockstep.worker.prediction import Predicted
from lockstep.worker.process_group import Rendezvous, arrival_key
from lockstep.worker.regroup import Formation, Standing
from lockstep.worker.report import Counted, Report, lost_report
from lockstep.worker.snapshot import Snapshot
from lockstep.worker.spec import WorkerSpec
from lockstep.worker.tracing import start_tracing, stop_tracing
from lockstep.worker.trial import Trial
from lockstep.worker.where import Whereabouts
from lockstep.worker.worker import Worker

__all__ = [
    "Counted",
    "Formation",
    "Outcome",
    "Predicted",
    "Progress",
    "Rendezvous",
    "Report",
    "Snapshot",
    "Standing",
    "Trial",
    "Whereabouts",
    "Worker",
    "WorkerSpec",
    "add_rank",
    "arrival_key",
    "failure",
    "is_peer_lost",
    "lost_report",
    "shown_error",
    "start_tracing",
    "stop_tracing",
]
