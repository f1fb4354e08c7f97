# SPDX-License-Identifier: Apache-2.0
"""A random program as data: what it is made of, small enough to read and to be written down."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Piece = dict[str, Any]
"""A statement: its ``kind``, and what it is made with."""


@dataclass(frozen=True)
class Step:
    """One step of the loop: what comes before the gradients, they, what comes after, the step."""

    gradients: Piece
    before: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()
    update: str = "step"


@dataclass(frozen=True)
class Spec:
    """One program.

    Attributes:
        seed: of weights and data.
        sync: which way to synchronise.
        workers: number of ranks.
        way: what a backward counts for: "equal", "delivered", "weighted", "tokens".
        splits: rows of each rank, for one batch after the other, round and round.
        absent: what a rank without rows does: "pending" or "borrowed".
        setup: statements before the loop; ``when`` says before or after attaching.
        clearing: how gradients are cleared: "none", "zeros", "model", "never".
    """

    seed: int = 0
    sync: str = "replicate"
    workers: int = 2
    model: str = "mlp"
    loss: str = "squared"
    way: str = "weighted"
    splits: tuple[tuple[int, ...], ...] = ((3, 3),)
    absent: str = "pending"
    optimizer: str = "momentum"
    clearing: str = "none"
    setup: tuple[Piece, ...] = ()
    steps: tuple[Step, ...] = (Step({"kind": "plain"}),)
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Spec:
        found = json.loads(text)
        steps = tuple(
            Step(step["gradients"], tuple(step["before"]), tuple(step["after"]), step["update"])
            for step in found["steps"]
        )
        splits = tuple(map(tuple, found["splits"]))
        return cls(**{**found, "steps": steps, "splits": splits, "setup": tuple(found["setup"])})

    def pieces(self) -> set[str]:
        """What it is made of, by the names that tables of pieces use."""
        found = {
            f"model:{self.model}", f"loss:{self.loss}", f"way:{self.way}",
            f"optimizer:{self.optimizer}", f"clearing:{self.clearing}", f"sync:{self.sync}",
        }  # fmt: skip
        found |= {f"setup:{piece['kind']}" for piece in self.setup}
        for step in self.steps:
            found.add(f"gradients:{step.gradients['kind']}")
            found |= {f"before:{piece['kind']}" for piece in step.before}
            found |= {f"after:{piece['kind']}" for piece in step.after}
            found.add(f"update:{step.update}")
        if "loop" in self.options:
            found |= {f"loop:{self.options['loop']}"}
            found |= {f"trainer:{name}" for name, value in self.options.items() if value}
        if any(0 in split for split in self.splits):
            found.add(f"absent:{self.absent}")
        return found

    def but(self, **changes: Any) -> Spec:
        return replace(self, **changes)
