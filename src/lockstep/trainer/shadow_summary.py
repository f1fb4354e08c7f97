# SPDX-License-Identifier: Apache-2.0
"""`ShadowSummary`: where the bits of two workers differed, over all calls of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lockstep.operator.shadow import ShadowCheck
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
        self._taken: set[ShadowCheck] = set()

    def take(self, checks: Iterable[ShadowCheck]) -> None:
        """Take checks of a call, also while it runs: it may fail, and then there is no report."""
        found = set(checks) - self._taken
        self.checked += len({each.step for each in found} - {each.step for each in self._taken})
        self._taken |= found
        wrong = sorted((check for check in found if check.wrong), key=lambda check: check.step)
        self.wrong += [check.as_dict() for check in wrong]

    def finish(self, reports: Sequence[Report]) -> None:
        """Take what the workers report of a call; all of them report the same."""
        self.take(check for report in reports for check in report.shadow_checks)
        self._taken = set()

    def as_dict(self) -> dict[str, Any]:
        """As in ``trainer.status()["shadow"]``."""
        return {"checked": self.checked, "wrong": list(self.wrong)}
