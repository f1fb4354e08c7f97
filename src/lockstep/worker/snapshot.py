# SPDX-License-Identifier: Apache-2.0
"""`Snapshot`: a copy of a run's state, or of a rank's part of it, until it has been written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lockstep.worker.tensor_pool import TensorPool


@dataclass(frozen=True)
class Snapshot:
    """A copy of a run's state between two steps.

    Attributes:
        step: global batches that the run has committed.
        state: as `TorchTrainer.state_dict` returns it, or as `StateAccess.own_state_dict` does, of
            a rank's part; None where each rank holds its part.
        pool: receives the memory of the copy when the snapshot has been written.
        call: of `train` in which the run came to this step, among all calls: after `load` a run may
            come to a step again.
    """

    step: int
    state: dict[str, Any] | None
    pool: TensorPool | None = None
    call: int = -1

    def give_back(self) -> None:
        """Let the next snapshot use the memory of this one, which has been written or left out."""
        if self.pool is not None:
            self.pool.put_back(self.state)


class CheckpointOnDisk(NamedTuple):
    """A snapshot of this run that has been written; `step` and `call` as a `Snapshot` has them."""

    step: int
    call: int
    path: str
