# SPDX-License-Identifier: Apache-2.0
"""`ReadAheadBatches`: batches that a user's `train_epoch` has read and not yet trained on.

A loop may read a batch before it trains on the previous one. Lockstep cannot see to which of the
read batches a backward belongs. That matters if the batches have different weights: the last ones
of an epoch, or a borrowed one (see `lockstep.data.sharded_loader`).
"""

from __future__ import annotations

from lockstep.errors import WeightError

_CAUSE = "train_epoch reads ahead of the batch that it trains on, or left one out"


class ReadAheadBatches:
    """The batches that a `train_epoch` of the user's own has read and not yet trained on."""

    def __init__(self) -> None:
        self._samples: list[int] = []  # by batch, the oldest first
        self._rounds = 0
        self._has_run = False  # whether a backward has run since the latest read
        self._has_ended = False
        self._has_guessed = False

    @property
    def has_equal_batches(self) -> bool:
        """Whether all these batches have the same number of samples."""
        return len(set(self._samples)) <= 1

    @property
    def has_borrowed_batch(self) -> bool:
        """Whether one of these batches is borrowed."""
        return 0 in self._samples

    def note_read(self, samples: int, rounds: int) -> None:
        """Note that a batch of `samples` was read, after `rounds` reductions of the run."""
        self._note_trained(rounds)
        self._samples.append(samples)

    def note_end(self, rounds: int) -> None:
        """Note that the iterator has ended; the loop may still train on batches it has read."""
        self._note_trained(rounds)
        self._has_ended = True

    def _note_trained(self, rounds: int) -> None:
        if self._samples and (self._has_run or rounds > self._rounds):
            del self._samples[0]
        self._rounds = rounds
        self._has_run = False

    def note_backward(self) -> None:
        self._has_run = True

    def resolve_weight(self, weight: float, where: str) -> float:
        """The weight of a backward for which the user passed `weight`.

        Args:
            weight: the user's.
            where: of this rank, for an error.

        Returns:
            `weight`; 0 if every batch that was read and not yet trained on is a borrowed one.

        Raises:
            WeightError: the user has weighed a borrowed batch as one of this worker's own.
        """
        if weight > 0 and self._samples and not any(self._samples):
            if not self._has_guessed:
                return 0
            raise WeightError(
                "a batch that counts for another worker was given a weight",
                where=where,
                expected="weight=0 for one of the batches that train_epoch has read",
                got=f"weight={weight:g} for the last one, and none of 0",
                cause=_CAUSE,
                fix="override train_batch instead of train_epoch",
            )
        if self._has_ended and not self.has_equal_batches:
            self._samples.remove(next(n for n in self._samples if (n > 0) == (weight > 0)))
            self._has_guessed = True
        return weight

    def unknown_rows_error(self, where: str) -> WeightError:
        """The error of a gather whose rows may be of a borrowed batch, and may not."""
        return WeightError(
            "whether this rank brings rows is not known",
            where=where,
            got=f"batches of {self._samples} samples, read and not yet trained on",
            cause=_CAUSE,
            fix="override train_batch instead",
        )

    def unknown_weight_error(self, where: str) -> WeightError:
        """The error of a backward whose batch may be any of several with different weights."""
        return WeightError(
            "the weight of this backward is not known",
            where=where,
            got=f"batches of {self._samples} samples, read and not yet trained on",
            cause=_CAUSE,
            fix="self.backward(loss, weight=number_of_its_samples), or override"
            " train_batch instead",
        )
