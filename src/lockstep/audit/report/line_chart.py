# SPDX-License-Identifier: Apache-2.0
"""Curves over steps, as SVG without a script."""

from __future__ import annotations

import html
import math

_WIDTH, _HEIGHT = 560, 150


def line_chart(title: str, lines: dict[str, list[tuple[int, float | None]]]) -> str:
    """Curves over steps; empty if there is no finite value."""
    values = [
        v for points in lines.values() for _, v in points if v is not None and math.isfinite(v)
    ]
    steps = [s for points in lines.values() for s, _ in points]
    if not values:
        return ""
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else low + 1.0
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return (step - first) / (last - first) * _WIDTH

    def y(value: float) -> float:
        return 3 + (high - value) / (high - low) * (_HEIGHT - 6)

    drawn = "".join(
        f'<polyline class="rank{place}" points="'
        + " ".join(
            f"{x(s):.1f},{y(v):.1f}" for s, v in points if v is not None and math.isfinite(v)
        )
        + '"/>'
        for place, points in enumerate(lines.values())
    )
    legend = "".join(
        f"<span><i class=rank{place}></i>{html.escape(name)}</span>"
        for place, name in enumerate(lines)
    )
    # The labels are text of the page: inside a picture that shrinks on a phone nobody reads them.
    return (
        f"<p class=soft>{html.escape(title)}</p><div class=legend>{legend}</div>"
        f"<div class=plot><div class=scale><span>{high:.3g}</span><span>{low:.3g}</span></div>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio=none role=img '
        f'aria-label="{html.escape(title)}">'
        f'<line class=axis x1=0 x2={_WIDTH} y1="{y(0.0):.1f}" y2="{y(0.0):.1f}"/>{drawn}</svg>'
        f"<div class=steps><span>step {first}</span><span>step {max(steps)}</span></div></div>"
    )
