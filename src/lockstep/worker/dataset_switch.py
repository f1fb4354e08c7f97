# SPDX-License-Identifier: Apache-2.0
"""`DatasetSwitch`: trains on a Ray dataset instead of the operator's own loader, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.data import RayDatasetShard
from lockstep.worker.data_cursor import Cursor
from lockstep.worker.loader_sharding import wants_joint

if TYPE_CHECKING:
    from lockstep.data import RayBatches
    from lockstep.operator import TrainingOperator


@dataclass
class DatasetSwitch:
    """Keeps the operator's own loader while training reads from a dataset.

    Attributes:
        loader: the cursor of the operator's own loader; None if it has none.
        position: epoch and step of a loaded checkpoint, until a dataset is there to read from: an
            operator without a training loader has no cursor that they could move.
        is_open: training reads from a dataset.
    """

    loader: Cursor | None = None
    position: dict[str, int] | None = None
    is_open: bool = False

    def begin(
        self,
        operator: TrainingOperator,
        cursors: dict[str, Cursor],
        rows: Any,
        batches: RayBatches,
    ) -> None:
        """Let `cursors["train"]` read `rows` from now on; the count of epochs continues.

        Raises:
            ConfigurationError: this worker would get no row of a global batch.
        """
        before, context = cursors.get("train"), operator._lockstep.context
        joint = wants_joint(operator, "train")
        cursor = Cursor(
            RayDatasetShard(rows, batches, context.shard_assignment, context.group, joint=joint)
        )
        if self.is_open and before is not None:
            cursor.move_to(before.epochs_entered, 0)
            before.close()
        else:
            self.loader = before
        if self.position is not None:
            cursor.move_to(self.position["epoch"], self.position["step"])
        self.is_open, self.position = True, None
        cursors["train"] = cursor
        _expect_weight(operator, batches.batch_size)

    def end(self, operator: TrainingOperator, cursors: dict[str, Cursor]) -> None:
        """Let `cursors["train"]` read the operator's own loader again, from its last position."""
        if not self.is_open:
            return
        cursors.pop("train").close()
        if self.loader is not None:
            cursors["train"] = self.loader
            _expect_weight(operator, self.loader.source.global_batch_size)
        self.loader, self.is_open = None, False


def _expect_weight(operator: TrainingOperator, weight: int | None) -> None:
    sync = operator._lockstep.sync
    if sync is not None:
        sync.expect_weight(weight)
