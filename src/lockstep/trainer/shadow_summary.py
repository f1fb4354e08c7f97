# SPDX-License-Identifier: Apache-2.0
"""`ShadowSummary`: where the bits of two workers differed, over all calls of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.worker import Report


class ShadowSummary:
    """Counts the shards that were compared.

    Attributes:
        checked: how many there were, each step once.
        wrong: those whose bits differed; see `TorchTrainer.status`.
    """

    def __init__(self) -> None:
        self.checked = 0
        self.wrong: list[dict[str, Any]] = []

    def take(self, reports: Sequence[Report]) -> None:
        """Take what the workers report of a call; all of them report the same."""
        found = {check for report in reports for check in report.shadow_checks}
        self.checked += len({check.step for check in found})
        wrong = sorted((check for check in found if check.wrong), key=lambda check: check.step)
        self.wrong += [check.as_dict() for check in wrong]

    def as_dict(self) -> dict[str, Any]:
        """As in ``trainer.status()["shadow"]``."""
        return {"checked": self.checked, "wrong": list(self.wrong)}
