# SPDX-License-Identifier: Apache-2.0
"""Where a rank stands, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.audit.ledger import Ledger


def standing(ledger: Ledger) -> str:
    """``is in all_reduce at train.py:31 (call 12)``, or what it failed with and where."""
    stuck, failure = ledger.stuck_in, ledger.failure
    if stuck is not None:
        at = f" at {stuck.where[0].at}" if stuck.where else ""
        verb = "failed in" if failure is not None else "is in"
        return f"{verb} {stuck.op}{at} (its collective {ledger.calls_made})"
    if failure is not None:
        at = f" at {ledger.stack[0].at}" if ledger.stack else ""
        return f"raised {failure.type}{at}"
    if ledger.exit_code is not None:
        return f"ended with code {ledger.exit_code} after {ledger.calls_made} collectives"
    at = f" at {ledger.stack[0].at}" if ledger.stack else ""
    return f"is{at} after {ledger.calls_made} collectives"
