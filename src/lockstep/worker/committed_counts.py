# SPDX-License-Identifier: Apache-2.0
"""`CommittedCounts`: the steps and samples that a worker has committed during one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class CommittedCounts:
    """Steps and samples that a worker has committed during one call.

    Attributes:
        steps: negative while the first batches of a window are computed again, which an earlier
            call has counted.
        has_stepped: an optimizer has stepped in the last batch.
        on_commit: called after every step.
        before_batch: called before every batch; an error that it raises ends the call between two
            steps.
        limit: the steps with which the call ends; None for the rest of the epoch.
    """

    steps: int = 0
    samples: int = 0
    has_stepped: bool = False
    on_commit: Callable[[], None] | None = None
    before_batch: Callable[[], None] | None = None
    limit: int | None = None

    @property
    def is_at_limit(self) -> bool:
        """Whether the call reads nothing more."""
        return self.limit is not None and self.steps >= self.limit
