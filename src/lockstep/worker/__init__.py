# SPDX-License-Identifier: Apache-2.0
"""One worker's life: process group, shards, the commit of a step."""

from lockstep.worker.outcome import Outcome, add_rank, failure, is_peer_lost, shown_error
from lockstep.worker.prediction import Predicted
from lockstep.worker.process_group import Rendezvous, arrival_key
from lockstep.worker.spec import WorkerSpec
from lockstep.worker.tracing import start_tracing, stop_tracing
from lockstep.worker.trial import Trial
from lockstep.worker.worker import Report, Worker

__all__ = [
    "Outcome",
    "Predicted",
    "Rendezvous",
    "Report",
    "Trial",
    "Worker",
    "WorkerSpec",
    "add_rank",
    "arrival_key",
    "failure",
    "is_peer_lost",
    "shown_error",
    "start_tracing",
    "stop_tracing",
]
