# SPDX-License-Identifier: Apache-2.0
"""The two tables that show whether ranks train one model: gradients by rank, drift by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lockstep.audit.shared_track import SharedTrack

TABLE_ROWS: Final = 8


def gradient_table(track: SharedTrack, name: str) -> list[dict[str, Any]]:
    """The first element of that gradient on every rank, step by step."""
    shared = next(p for p in track.parameters if p.name == name)
    rows = []
    for number in track.numbers[:TABLE_ROWS]:
        values = {}
        for rank, step in track.steps(number).items():
            if step.gradients is None or rank not in shared.index:
                continue
            samples = track.sampled(step.gradients, shared, rank)
            if samples:
                values[str(rank)] = samples[0]
        rows.append({"step": number + 1, "parameter": name, "values": values})
    return rows


def drift_table(track: SharedTrack) -> list[dict[str, float]]:
    """How far replicas were apart after each step."""
    return [{"step": step, "drift": drift} for step, drift in track.drift()[:TABLE_ROWS]]
