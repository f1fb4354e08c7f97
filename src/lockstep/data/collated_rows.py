# SPDX-License-Identifier: Apache-2.0
"""`CollatedRows`: notices a `collate_fn` that leaves samples out.

The loss of a shard is a mean over the rows of its batch, and counts for the samples that were asked
for. That is exact while each row stands for as many samples as in every other batch: for one, or
for two where the `collate_fn` makes pairs. A `collate_fn` that drops rows breaks it.

Rows are counted only where tensors certainly hold one along their first dimension for each row: a
batch of another layout (time steps first, packed tokens, a list of samples) shows nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from lockstep.data.sample_lists import sample_lists
from lockstep.errors import WeightError
from lockstep.keys import WEIGHT
from lockstep.tensor_tree import leaves_of

if TYPE_CHECKING:
    from collections.abc import Callable


class CollatedRows:
    """Compares the rows of the batches that one `collate_fn` makes with the samples it was given.

    Attributes:
        collate_fn: the loader's; torch's own leave nothing out.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn
        self._is_users = collate_fn is not default_collate and collate_fn is not default_convert
        self._samples_per_row: int | None = None

    def weight_error(self, batch: Any, num_samples: int) -> WeightError | None:
        """The error to raise where `batch` counts for its `num_samples`; None if it may."""
        rows = _count_rows(batch, num_samples) if self._is_users else None
        if rows is None:
            return None
        per_row, rest = divmod(num_samples, rows) if rows else (0, num_samples)
        if rest == 0 and self._samples_per_row in (None, per_row):
            self._samples_per_row = per_row
            return None
        return WeightError(
            f"the collate_fn returned {rows} of {num_samples} samples",
            expected="as many rows as samples, or in every batch the same number of samples a row",
            got=f"tensors of {rows} rows",
            cause="it leaves samples out, and the mean over the others would count for all of them",
            fix="filter in the dataset or the sampler; or return from compute_loss, beside the"
            f" loss, {{{WEIGHT!r}: number_of_rows}}",
        )


def _count_rows(batch: Any, num_samples: int) -> int | None:
    """The rows of a batch, at most `num_samples`; None where its tensors do not show them."""
    shapes = [
        tuple(leaf.shape)
        for leaf in leaves_of(batch)
        if isinstance(leaf, (torch.Tensor, np.ndarray))
    ]
    if len(shapes) < 2 or not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        return None
    rows = int(shapes[0][0])
    if rows == num_samples:
        return rows
    # The samples may be along another dimension, or along a list.
    is_other_layout = any(num_samples in shape for shape in shapes) or any(
        sample_lists(batch, num_samples)
    )
    return None if rows > num_samples or is_other_layout else rows
