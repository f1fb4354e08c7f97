# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the pages.

python docs/pictures/draw.py

Each has a ground of its own, which follows the reader's colour scheme: it can be read on a light
and on a dark page, whichever of the two the page was switched to. They are narrow, so that their
letters keep a readable size on a phone.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH = 400
LINE = 18

STYLE = """
  .ground{fill:#fbfcfe} .box{fill:#e8eefb;stroke:#3b62b8} .plain{fill:#fff;stroke:#8a94a6}
  .good{fill:#e3f4e8;stroke:#2c8a4b} .bad{fill:#fde8e6;stroke:#c0392b}
  .line{stroke:#5c6675;fill:none;stroke-width:1.5} .head{fill:#5c6675}
  .lane{stroke:#b6bfcc;stroke-width:1.5;stroke-dasharray:3 4}
  .bar{stroke:#3b62b8;stroke-width:6;stroke-linecap:round}
  text{font:14px system-ui,sans-serif;fill:#1c2430;text-anchor:middle}
  .soft{fill:#515b69} .strong{font-weight:600} .left{text-anchor:start}
  @media (prefers-color-scheme:dark){
    .ground{fill:#171a20} .box{fill:#22304d;stroke:#7fa2f0} .plain{fill:#20242c;stroke:#78839a}
    .good{fill:#1d3a28;stroke:#5cc481} .bad{fill:#45211f;stroke:#f08a80}
    .line{stroke:#a3adbc} .head{fill:#a3adbc} .lane{stroke:#4b5464} .bar{stroke:#7fa2f0}
    text{fill:#e8ebf0} .soft{fill:#b1bac7}
  }
"""


class Picture:
    """Shapes, collected from top to bottom."""

    def __init__(self, title: str, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height}" rx="12"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self._parts.append(f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, lines: list[str], kind: str = "box") -> float:
        """A box with its lines in the middle; where it ends."""
        height = len(lines) * LINE + 14
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>'
        )
        for number, words in enumerate(lines):
            emphasis = "strong" if number == 0 and len(lines) > 1 else ""
            self.text(x + width / 2, y + 21 + number * LINE, words, emphasis)
        return y + height

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "line") -> None:
        self._parts.append(f'<path d="M{x} {y}L{to_x} {to_y}" class="{kind}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Straight down, or straight to a side."""
        self.line(x, y, to_x, to_y)
        if x == to_x:
            tip = f"M{to_x} {to_y}l-5 -8h10z"
        else:
            back = -8 if to_x > x else 8
            tip = f"M{to_x} {to_y}l{back} -5v10z"
        self._parts.append(f'<path d="{tip}" class="head"/>')

    def cross(self, x: float, y: float) -> None:
        for way in (1, -1):
            self._parts.append(
                f'<path d="M{x - 7} {y - 7 * way}L{x + 7} {y + 7 * way}" class="bad"'
                ' stroke-width="3.5"/>'
            )

    def drawn(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def step() -> Picture:
    """The way of a global batch through one optimizer step."""
    picture = Picture("The way of a global batch through one step", 636)
    middle, left, right, wide = WIDTH / 2, 14, 206, 180
    columns = (left + wide / 2, right + wide / 2)

    end = picture.box(70, 14, 260, ["your loader", "one order, from seed and epoch"], "plain")
    picture.arrow(middle, end, middle, end + 22)
    picture.text(middle, end + 40, "one global batch, cut into 4 shards", "soft")
    top = end + 50
    for number in range(4):
        x = left + number * 93 + (6 if number > 1 else 0)
        picture.box(x, top, 87, [f"shard {number}"], "plain")
    for number, column in enumerate(columns):
        picture.arrow(column, top + 32, column, top + 54)
        picture.box(
            (left, right)[number],
            top + 54,
            wide,
            [f"worker {number}", f"carries shards {2 * number} and {2 * number + 1}"],
        )
        picture.arrow(column, top + 104, column, top + 126)
        picture.box(
            (left, right)[number],
            top + 126,
            wide,
            ["loss of each shard", "times what it counts for:", "its samples, its tokens"],
            "plain",
        )
        picture.arrow(column, top + 194, column, top + 216)
        picture.box(
            (left, right)[number],
            top + 216,
            wide,
            ["backward", "fills buckets with", "gradients, in place"],
            "plain",
        )
        picture.arrow(column, top + 284, column, top + 306)
    end = picture.box(
        left,
        top + 306,
        right + wide - left,
        [
            "all-reduce of each bucket that is full",
            "while backward still runs on the rest:",
            "sum of gradients / sum of what they count for",
        ],
    )
    for number, column in enumerate(columns):
        picture.arrow(column, end, column, end + 22)
        picture.box(
            (left, right)[number],
            end + 22,
            wide,
            ["optimizer.step()", "the same gradient,", "the same weights"],
            "good",
        )
    picture.text(middle, end + 116, "The step counts when the next batch is asked for.", "soft")
    return picture


def recovery() -> Picture:
    """What happens when a worker is killed in the middle of a step."""
    height = 664
    picture = Picture("A worker is killed in the middle of a step, and the run goes on", height)
    wide = 90
    lanes = {"worker 0": 55, "worker 1": 152, "spare": 249, "driver": 346}
    for name, x in lanes.items():
        picture.line(x, 46, x, height - 40, "lane")
        picture.box(x - wide / 2, 14, wide, [name], "plain")
    zero, one, spare, driver = lanes.values()

    def box(x: float, y: float, *lines: str, kind: str = "plain") -> None:
        picture.box(x - wide / 2, y, wide, list(lines), kind)

    for x in (zero, one):
        box(x, 64, "step k", kind="good")
        box(x, 112, "step k + 1", kind="box")
    box(spare, 64, "is ready,", "and waits")
    picture.cross(one, 174)
    picture.text(one, 202, "killed", "strong")

    picture.arrow(one - 12, 174, zero + wide / 2, 174)
    picture.text(zero, 179, "hears it")
    box(zero, 196, "undoes", "step k + 1")
    picture.arrow(zero + wide / 2, 228, driver - wide / 2, 228)
    box(driver, 210, "who lives,", "who is", "furthest?")
    picture.line(driver, 278, driver, 322)
    picture.arrow(driver, 322, spare + wide / 2, 322)
    box(spare, 297, "is rank 1", "from here")

    across = spare - zero + wide
    picture.box(zero - wide / 2, 368, across, ["the group forms anew: generation 1"])
    box(zero, 420, "hands over")
    picture.arrow(zero + wide / 2, 436, spare - wide / 2, 436)
    picture.text(one, 430, "state", "soft")
    box(spare, 420, "takes over")
    picture.box(zero - wide / 2, 472, across, ["the bits of all are compared"], "plain")
    for x in (zero, spare):
        box(x, 524, "step k + 1,", "once more", kind="good")
        box(x, 590, "step k + 2", kind="good")
    box(driver, 524, "starts the", "next spare")
    picture.text(WIDTH / 2, height - 14, "Same samples, same random numbers, same weights.", "soft")
    return picture


PICTURES = {"step.svg": step, "recovery.svg": recovery}


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw().drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
