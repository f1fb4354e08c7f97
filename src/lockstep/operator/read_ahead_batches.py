# SPDX-License-Identifier: Apache-2.0
"""`ReadAheadBatches`: batches that a user's `train_epoch` has read and not yet trained on.

A loop may read a batch before it trains on the previous one. Lockstep cannot see to which of the
read batches a backward belongs. That matters if the batches have different weights: the last ones
of an epoch, or a borrowed one (see `lockstep.data.sharded_loader`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.data.batch_rows import count_samples_of_any, rows_of
from lockstep.data.sample_lists import sample_lists
from lockstep.errors import WeightError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.operator.shard_batch import ShardBatch

_CAUSE = "train_epoch reads ahead of the batch that it trains on, or left one out"


class _Unused(NamedTuple):
    """A batch that was read and not yet trained on, without the batch itself.

    Attributes:
        samples: those for which it counts.
        rows: its leading length, or that of its list of samples; None if it has neither.
    """

    samples: int
    rows: int | None


class ReadAheadBatches:
    """The batches that a `train_epoch` of the user's own has read and not yet trained on.

    Args:
        where: names this rank and step, for an error.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where
        self._unused: list[_Unused] = []  # the oldest first
        self._latest: ShardBatch | None = None
        self._is_repeated = False  # the latest one is the same object as the one before
        self._progress = 0
        self._has_run = False  # whether a backward has run since the latest read
        self._has_ended = False
        self._has_guessed = False

    @property
    def has_equal_batches(self) -> bool:
        """Whether all these batches have the same number of samples."""
        return len({each.samples for each in self._unused}) <= 1

    @property
    def has_borrowed_batch(self) -> bool:
        """Whether one of these batches is borrowed."""
        return not all(each.samples for each in self._unused)

    @property
    def is_behind(self) -> bool:
        """Whether the loop has still to train on a batch that it has read."""
        return bool(self._unused)

    @property
    def are_borrowed(self) -> bool:
        """Whether there are such batches, and every one is borrowed."""
        return bool(self._unused) and not any(each.samples for each in self._unused)

    @property
    def may_be_borrowed(self) -> bool:
        """Whether the batch in hand may be a borrowed one, and may be this worker's own."""
        return self.has_borrowed_batch and (self._has_guessed or not self.are_borrowed)

    def note_read(self, read: ShardBatch, progress: int) -> None:
        """Note that the batch `read` was read.

        Args:
            progress: of the gradients' synchronisation, see `GradientSync.progress`. A backward
                under `no_sync` is no reduction, and trains on a batch all the same.
        """
        self._note_trained(progress)
        is_list = any(sample_lists(read.batch, read.num_samples))
        rows = read.num_samples if is_list else rows_of(read.batch)
        self._unused.append(_Unused(read.num_samples, rows))
        self._is_repeated = self._latest is not None and self._latest.batch is read.batch
        self._latest = read

    def note_end(self, progress: int) -> None:
        """Note that the iterator has ended; the loop may still train on batches it has read."""
        self._note_trained(progress)
        self._has_ended = True
        if not self._unused:
            self._latest = None  # nothing will be made from it

    def _note_trained(self, progress: int) -> None:
        if self._unused and (self._has_run or progress != self._progress):
            del self._unused[0]
        self._progress = progress
        self._has_run = False

    def note_backward(self) -> None:
        self._has_run = True

    def source_of(self, batch: Any, delivered: ShardBatch | None) -> ShardBatch | None:
        """The latest batch that was read, with the samples of that from which `batch` is made.

        Args:
            batch: a batch of the loop: one that it has read, or one that it has made from it.
            delivered: the answer where no batch was noted, or all were trained on.

        Raises:
            WeightError: `batch` may be from any of several batches that count differently.
        """
        if self._latest is None or not self._unused:
            return delivered
        is_latest = self._latest.batch is batch and not self._is_repeated
        are_alike = len(set(self._unused)) == 1
        if is_latest or are_alike:
            return self._latest
        count = None
        if all(each.rows == each.samples for each in self._unused):
            are_rows = not any(sample_lists(self._latest.batch, self._latest.num_samples))
            counts = {each.samples for each in self._unused}
            count = count_samples_of_any(batch, counts, are_rows=are_rows)
        if count is None:
            raise self.unknown_weight_error()
        return replace(self._latest, num_samples=count)

    def resolve_weight(self, weight: float) -> float:
        """The weight of a backward for which the user passed `weight`.

        Returns:
            `weight`; 0 if every batch that was read and not yet trained on is a borrowed one.

        Raises:
            WeightError: the user has weighed a borrowed batch as one of this worker's own.
        """
        if weight > 0 and self.are_borrowed:
            if not self._has_guessed:
                return 0
            raise WeightError(
                "a batch that counts for another worker was given a weight",
                where=self._where(),
                expected="weight=0 for one of the batches that train_epoch has read",
                got=f"weight={weight:g} for the last one, and none of 0",
                cause=_CAUSE,
                fix="override train_batch instead of train_epoch",
            )
        if self._has_ended and not self.has_equal_batches:
            # Of batches that count alike, any; a loss without tokens may weigh 0 in any batch.
            alike = (each for each in self._unused if (each.samples > 0) == (weight > 0))
            self._unused.remove(next(alike, self._unused[0]))
            self._has_guessed = True
        return weight

    def unknown_rows_error(self) -> WeightError:
        """The error of a gather whose rows may be of a borrowed batch, and may not."""
        return self._unknown(
            "whether this rank brings rows is not known", "override train_batch instead"
        )

    def unknown_weight_error(self) -> WeightError:
        """The error of a backward whose batch may be any of several with different weights."""
        return self._unknown(
            "the weight of this backward is not known",
            "self.backward(loss, weight=number_of_its_samples), or override train_batch instead",
        )

    def _unknown(self, what: str, fix: str) -> WeightError:
        samples = [each.samples for each in self._unused]
        rows = [each.rows for each in self._unused]
        of_rows = "" if rows == samples else f" and leading lengths {rows}"
        return WeightError(
            what,
            where=self._where(),
            got=f"batches of {samples} samples{of_rows}, read and not yet trained on",
            cause=_CAUSE,
            fix=fix,
        )
