# SPDX-License-Identifier: Apache-2.0
"""The page's curves and its rank by parameter map, as SVG without a script."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from lockstep.audit.diagnoses.seen import seen_in
from lockstep.audit.report.line_chart import line_chart
from lockstep.audit.report.words import cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.audit.shared_track import SharedTrack
    from lockstep.audit.world import World

_COLOURS = 4
_ROWS = 60
_CELL = 18
_COLUMNS = 16


def coefficients(evidence: dict[str, Any]) -> str:
    """Who contributed how much to whose step, as a table: one row for each rank that stepped."""
    columns, rows = evidence.get("columns") or [], evidence.get("coefficients") or {}
    if not columns or not rows:
        return ""
    error = float(evidence.get("error", 0.0))
    largest = max((abs(value) for row in rows.values() for value in row), default=0.0) or 1.0
    several = any(backward > 0 for _, backward in columns)
    heads = "".join(
        f"<th>rank {rank}{f', backward {backward + 1}' if several else ''}</th>"
        for rank, backward in columns[:_COLUMNS]
    )
    body = "".join(
        f"<tr><th>rank {html.escape(rank)} used</th>"
        + "".join(
            f'<td class=share style="--share: {abs(value) / largest:.2f}">{value:.4g}</td>'
            for value in (x if abs(x) > error else 0.0 for x in row[:_COLUMNS])
        )
        + "</tr>"
        for rank, row in list(rows.items())[:_COLUMNS]
    )
    more = " (the first ones)" if max(len(columns), len(rows)) > _COLUMNS else ""
    return (
        "<p class=soft>By what the gradients that autograd brought to each rank were multiplied in "
        f"what each rank's optimizer used, &plusmn; {error:.0e}{more}</p>"
        f"<table><tr><th></th>{heads}</tr>{body}</table>"
    )


def coefficients_of_tracks(world: World) -> str:
    """The same of every optimizer's first step that tells, where nothing was found."""
    blocks = []
    for track in world.compared:
        seen = next((s for n in track.numbers for s in seen_in(track, n, None) if s.mixing), None)
        if seen is not None and not seen.is_assumed:
            title = html.escape(f"{track.key}, step {seen.number + 1}")
            blocks.append(f"<h3>{title}</h3>{coefficients(seen.as_evidence())}")
    found = "".join(blocks)
    return f"<section><h2>Who contributes to whose step</h2>{found}</section>" if found else ""


def curves(evidence: dict[str, Any]) -> str:
    """Gradient per rank and drift, where a finding has them."""
    found = ""
    gradients = evidence.get("gradients") or []
    if gradients:
        ranks = sorted({rank for row in gradients for rank in row["values"]}, key=int)
        lines = {
            f"rank {rank}": [(row["step"], row["values"].get(rank)) for row in gradients]
            for rank in ranks[:_COLOURS]
        }
        title = f"Gradient of {gradients[0]['parameter']}[0], by rank{cut(gradients)}"
        found += line_chart(title, lines)
    drift = evidence.get("drift") or []
    if drift:
        points = {"drift": [(row["step"], row["drift"]) for row in drift]}
        title = f"Largest difference between replicas after the step{cut(drift)}"
        found += line_chart(title, points)
    return found


def curves_of_tracks(world: World) -> str:
    """The same of every optimizer, where nothing was found: lines that lie on one another."""
    blocks = [
        curves(
            {
                "gradients": track.gradient_table(track.parameters[0].name),
                "drift": track.drift_table(),
            }
        )
        for track in world.compared
        if track.parameters
    ]
    found = "".join(blocks)
    return f"<section><h2>Gradients and replicas</h2>{found}</section>" if found else ""


def differences_map(world: World) -> str:
    """Which parameter differed on which rank in any step, one square each."""
    blocks = [_track_map(track) for track in world.compared]
    blocks = [block for block in blocks if block]
    if not blocks:
        return ""
    return (
        "<section><h2>Rank by parameter</h2><p class=soft>green: replicas agreed after every step "
        "that was looked at; red: they did not; grey: not compared</p>" + "".join(blocks)
    ) + "</section>"


def _track_map(track: SharedTrack) -> str:
    differing: dict[str, set[int]] = {}
    for number in track.numbers:
        for difference in track.differences("exit", number):
            differing.setdefault(difference.name, set()).update(difference.ranks)
    compared = {p.name: p for p in track.parameters}
    names = list(dict.fromkeys(p.name for t in track.tracks.values() for p in t.parameters))
    names.sort(key=lambda name: name not in differing)
    rows = [
        _row(place + 1, name, track.ranks, differing.get(name, set()), name in compared)
        for place, name in enumerate(names[:_ROWS])
    ]
    more = f"<p class=soft>and {len(names) - _ROWS} more</p>" if len(names) > _ROWS else ""
    width = 24 + _CELL * len(track.ranks) + 320
    height = _CELL * (len(rows) + 1) + 4
    return (
        f"<p class=soft>{html.escape(track.key)}</p><div class=chart>"
        f'<svg viewBox="0 0 {width} {height}" width={width} role=img '
        f'aria-label="differences by rank and parameter">{_headings(track.ranks)}'
        f"{''.join(rows)}</svg></div>{more}"
    )


def _headings(ranks: Sequence[int]) -> str:
    numbers = "".join(
        f'<text class=rank x="{column * _CELL + (_CELL - 2) / 2}" y=13>{rank}</text>'
        for column, rank in enumerate(ranks)
    )
    return f"{numbers}<text x={len(ranks) * _CELL + 8} y=13>(rank)</text>"


def _row(place: int, name: str, ranks: Sequence[int], differs: set[int], compared: bool) -> str:
    y = place * _CELL
    cells = "".join(
        f'<rect class="cell-{int(rank in differs) if compared else 2}" x={column * _CELL} y={y} '
        f"width={_CELL - 2} height={_CELL - 2} rx=2><title>rank {rank}</title></rect>"
        for column, rank in enumerate(ranks)
    )
    at = len(ranks) * _CELL + 8
    return f"{cells}<text x={at} y={y + 13}>{html.escape(name)}</text>"
