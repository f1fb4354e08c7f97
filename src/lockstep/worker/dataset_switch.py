# SPDX-License-Identifier: Apache-2.0
"""`DatasetSwitch`: trains on a Ray dataset instead of the operator's own loader, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lockstep.data import RayDatasetShard
from lockstep.errors import ConfigurationError
from lockstep.worker.data_cursor import Cursor
from lockstep.worker.loader_sharding import wants_joint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.data import RayBatches
    from lockstep.operator import TrainingOperator

DATASET: Final = "dataset"
"""In a state's positions, beside the purposes of loaders."""


@dataclass
class DatasetSwitch:
    """Keeps the operator's own loader while training reads from a dataset.

    Attributes:
        loader: the cursor of the operator's own loader; None if it has none.
        position: epoch and step at which the next dataset is read: those of a loaded checkpoint, or
            of the dataset that was read last. None for the first dataset of a run.
        is_open: training reads from a dataset.
    """

    loader: Cursor | None = None
    position: dict[str, Any] | None = None
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
            ConfigurationError: this worker would get no row of a global batch, or batches of the
                operator's own loader wait for the rest of their window (`accumulate`).
        """
        before, context = cursors.get("train"), operator._lockstep.context
        if before is not None and not self.is_open and before.has_open_window:
            raise _open_window_error(before, context.options.accumulate)
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
            cursor.load_place(self.position)
        self.is_open, self.position = True, None
        cursors["train"] = cursor
        _expect_weight(operator, batches.batch_size)

    def end(self, operator: TrainingOperator, cursors: dict[str, Cursor]) -> None:
        """Let `cursors["train"]` read the operator's own loader again, from its last position."""
        if not self.is_open:
            return
        dataset = cursors.pop("train")
        # The pass is read anew, as the same one: no epoch counts whose rows were not all read.
        self.position = {"epoch": dataset.epochs_finished, "step": 0}
        dataset.close()
        if self.loader is not None:
            cursors["train"] = self.loader
            _expect_weight(operator, self.loader.source.global_batch_size)
        self.loader, self.is_open = None, False

    @property
    def epochs_finished(self) -> int:
        """Passes completed over datasets that are not read any more."""
        before = self.position or {"epoch": 0}
        return int(before["epoch"]) + bool(before.get("is_over"))

    def positions(self, cursors: Mapping[str, Cursor]) -> dict[str, dict[str, Any]]:
        """The places of the loaders, by purpose, and of the dataset, for a state.

        Where training reads a dataset, `cursors["train"]` is the dataset's.
        """
        found = {purpose: cursor.place for purpose, cursor in cursors.items()}
        if self.is_open:
            found[DATASET] = found.pop("train")
            if self.loader is not None:
                found["train"] = self.loader.place
        elif self.position is not None:
            found[DATASET] = dict(self.position)
        return found

    def move_to(
        self, positions: Mapping[str, Mapping[str, Any]], cursors: Mapping[str, Cursor]
    ) -> None:
        """Move the loaders and the dataset to the positions of a state."""
        loaders = dict(cursors)
        dataset = loaders.pop("train") if self.is_open else None
        if self.loader is not None:
            loaders["train"] = self.loader
        # A state of an earlier version has no other place for a dataset's position.
        place = positions.get(DATASET, None if "train" in loaders else positions.get("train"))
        for purpose, cursor in loaders.items():
            if purpose in positions:
                cursor.load_place(positions[purpose])
        if dataset is not None and place is not None:
            dataset.load_place(place)
        elif dataset is None:
            self.position = None if place is None else dict(place)


def _open_window_error(loader: Cursor, accumulate: int) -> ConfigurationError:
    return ConfigurationError(
        "batches of the operator's own loader wait for an optimizer's step",
        where=f"step {loader.step} of the epoch",
        expected=f"windows of accumulate={accumulate} batches that are full, or an epoch's end",
        got=f"{loader.step - loader.window_start} batches without a step, and a Ray dataset",
        fix=f"train(num_steps=...) by multiples of {accumulate} before train(dataset=...)",
    )


def _expect_weight(operator: TrainingOperator, weight: int | None) -> None:
    sync = operator._lockstep.sync
    if sync is not None:
        sync.expect_weight(weight)
