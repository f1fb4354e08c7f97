# SPDX-License-Identifier: Apache-2.0
"""`LostWorker`: the record of a worker whose process is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.errors import WorkerDiedError
    from lockstep.worker import WorkerStatus


@dataclass(frozen=True)
class LostWorker:
    """A worker whose process is gone.

    Attributes:
        worker: the handle of the worker.
        rank: the rank that it had.
        shards: the shards of each global batch that it computed.
        died: the error that says why it is gone.
        last_seen: its last known status.
        may_be_replaced: False for a worker that raised as it joined: another one would, too.
    """

    worker: WorkerHandle
    rank: int
    shards: range
    died: WorkerDiedError
    last_seen: WorkerStatus | None = None
    may_be_replaced: bool = True
