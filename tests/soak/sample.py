# SPDX-License-Identifier: Apache-2.0
"""A fixed choice of programs: every piece by itself, and pairs of pieces where they are cheap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from soak.drawing import RAW, WINDOWS, is_fair, named
from soak.gradients import GRADIENTS
from soak.models import MODELS
from soak.operators import LOOPS
from soak.spec import Piece, Spec, Step
from soak.statements import AFTER, BEFORE, SETUP
from soak.text import LOSSES

AMONG = 2500
"""The choice is made among so many programs."""

_PAIRED = ("sync", "gradients", "way", "absent", "loop", "clearing", "setup")


def every_piece() -> set[str]:
    """The names of all pieces that a sample has to hold; see `Spec.pieces`."""
    models = (name for name, model in MODELS.items() if "slow" not in model.tags)
    tables = {
        "model": models,
        "loss": LOSSES,
        "setup": SETUP,
        "before": BEFORE,
        "gradients": GRADIENTS,
        "after": AFTER,
        "loop": LOOPS,
    }
    return {f"{table}:{name}" for table, names in tables.items() for name in names}


SYNCS = ("replicate", "ddp", "parameter_server", "data_parallel")

_PLAIN = Step({"kind": "plain"})
_BASE = Spec(splits=((3, 2), (1, 4)), steps=(_PLAIN,) * 3)
_NEEDED = {"remove_hook": "hook_scale", "unfreeze": "frozen", "see_hooked": "hook_read",
           "flat_scale": "flat", "flat_read": "flat"}  # fmt: skip


def singles() -> dict[str, Spec]:
    """Every piece by itself, under every way to synchronise that knows it."""
    found: dict[str, Spec] = {}
    for sync in SYNCS:
        base = _BASE.but(sync=sync)
        for piece in sorted(every_piece()):
            table, name = piece.split(":")
            for number, spec in enumerate(_alone(base, table, name)):
                if is_fair(spec):
                    found[f"{sync}-{table}-{name}-{number}"] = spec
        for absent in ("pending", "borrowed"):
            for way in ("delivered", "weighted", "tokens", "sums"):
                for model in ("mlp", "branches"):
                    fields = {"absent": absent, "way": way, "model": model}
                    found[f"{sync}-rows-{'-'.join(fields.values())}"] = base.but(
                        splits=((0, 3), (2, 0)), optimizer="decay", **fields
                    )
    return found


def _alone(base: Spec, table: str, name: str) -> Iterator[Spec]:
    if table in ("model", "loss"):
        changes = {"splits": ((4, 0),), "way": "delivered"} if name == "norm_training" else {}
        yield base.but(**{table: name, **changes})
        if table == "model":
            yield base.but(model=name, way="equal", splits=((2, 2),), workers=2, clearing="zeros")
    elif table == "setup":
        clearing = "flat" if name == "flat" else "none"
        update = "none" if name == "post_step" else "step"
        steps = tuple(replace(step, update=update) for step in base.steps)
        for when in ("before", "after"):
            setup = ({"kind": name, "when": when, "i": 0},)
            yield base.but(setup=setup, clearing=clearing, steps=steps, way="delivered")
    elif table == "gradients":
        yield from _alone_gradients(base, name)
    elif table == "loop":
        options = {"loop": name, "rows": 11, "batch": 6, "accumulate": 1, "clip": None,
                   "reproducible": False, "more_shards": 0}  # fmt: skip
        yield base.but(options=options)
        if name == "default":
            yield base.but(options={**options, "accumulate": 2, "clip": 0.05, "more_shards": 1})
            yield base.but(options=options, way="tokens")
            if base.sync == "replicate":
                yield base.but(options={**options, "reproducible": True, "more_shards": 2})
    else:
        yield from _alone_statement(base, table, name)


def _alone_gradients(base: Spec, name: str) -> Iterator[Spec]:
    step = Step({"kind": name})
    steps = (_PLAIN, step, _PLAIN) if name in ("nothing", "idle") else (step, step)
    is_closed = name in RAW | WINDOWS or name in ("nothing", "idle", "gradient_argument")
    optimizer = "lbfgs" if name == "closure" else "momentum"
    if name in RAW:
        yield base.but(steps=(*steps, _PLAIN), way="delivered")
        return
    yield base.but(steps=steps, optimizer=optimizer)
    if is_closed or base.sync == "data_parallel":
        yield base.but(steps=steps, way="equal", splits=((2, 2),))
    else:
        yield base.but(
            steps=steps, optimizer=optimizer, way="tokens", splits=((4, 3, 2),), workers=3
        )


def _alone_statement(base: Spec, table: str, name: str) -> Iterator[Spec]:
    pieces: tuple[Piece, ...] = ({"kind": name, "i": 0, "rank": 1, "to_none": True},)
    step = replace(_PLAIN, **{table: pieces})
    if name == "hold":
        step = replace(step, after=({"kind": "see_held"},))
    if name == "see_held":
        step = replace(step, before=({"kind": "hold"},))
    needed = _NEEDED.get(name)
    if name in ("caught_inside_one", "extra_backward"):
        base = base.but(way="equal", splits=((2, 2),), workers=2)
    yield base.but(
        model={"tie": "deep", "untie": "tied"}.get(name, "mlp"),
        setup=({"kind": needed, "when": "after", "i": 0},) if needed else (),
        clearing="flat" if needed == "flat" else "none",
        optimizer="sgd" if name == "other_shape" else "momentum",
        steps=(_PLAIN, step, _PLAIN),
    )


def sample(size: int) -> list[str]:
    """Names of programs: greedily those that hold something new."""
    drawn = [(f"sample:{number}", named(f"sample:{number}")) for number in range(AMONG)]
    held = {name: set(_held(spec)) for name, spec in drawn if spec.sync != "fsdp"}
    singles = every_piece()
    chosen: list[str] = []
    for wanted in (singles, None):
        left = set.union(*held.values()) if wanted is None else wanted
        for name in chosen:
            left = left - held[name]
        for name, _ in drawn:
            gain = len(left & held.get(name, set()))
            if len(chosen) < size and name not in chosen and gain > (0 if wanted else 2):
                chosen.append(name)
                left = left - held[name]
    return chosen


def _held(spec: Spec) -> Iterator[str]:
    pieces = spec.pieces()
    yield from pieces
    paired = sorted(piece for piece in pieces if piece.split(":")[0] in _PAIRED)
    for one, other in combinations(paired, 2):
        yield f"{one} {other}"
