# SPDX-License-Identifier: Apache-2.0
"""The smallest program that still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from soak.drawing import is_fair
from soak.judging import Outcome
from soak.spec import Piece, Spec, Step

RUNS = 120
"""At most so many programs are tried."""


def shrunk(spec: Spec, failure: Outcome, run: Callable[[Spec], Outcome]) -> Spec:
    """A smaller spec whose outcome is as `failure`: the same kind, the same what."""
    tried, progress = 0, True
    while progress and tried < RUNS:
        progress = False
        for smaller in candidates(spec):
            if tried >= RUNS:
                break
            if not is_fair(smaller):
                continue
            tried += 1
            outcome = run(smaller)
            if (outcome.kind, outcome.what) == (failure.kind, failure.what):
                spec, progress = smaller, True
                break
    return spec


def candidates(spec: Spec) -> Iterator[Spec]:
    """Simpler specs, the greatest leaps first."""
    yield from _fewer_steps(spec)
    yield from _simpler_fields(spec)
    for number, step in enumerate(spec.steps):
        for simpler in _simpler_steps(step):
            steps = (*spec.steps[:number], simpler, *spec.steps[number + 1 :])
            yield spec.but(steps=steps)
    for number, piece in enumerate(spec.setup):
        yield spec.but(setup=_without(spec.setup, number))
        for simpler in _simpler_piece(piece):
            yield spec.but(setup=(*spec.setup[:number], simpler, *spec.setup[number + 1 :]))
    yield from _fewer_ranks_and_rows(spec)


def _fewer_steps(spec: Spec) -> Iterator[Spec]:
    count = len(spec.steps)
    if count > 1:
        yield spec.but(steps=spec.steps[:1])
        yield spec.but(steps=spec.steps[-1:])
        yield from (
            spec.but(steps=spec.steps[:number] + spec.steps[number + 1 :])
            for number in range(count)
        )


def _simpler_fields(spec: Spec) -> Iterator[Spec]:
    simplest = {
        "model": ("linear", "mlp"),
        "loss": ("squared",),
        "way": ("equal", "delivered", "weighted"),
        "optimizer": ("sgd", "momentum"),
        "clearing": ("none", "zeros"),
        "absent": ("pending",),
        "sync": ("replicate",),
        "seed": (1,),
    }
    for field, values in simplest.items():
        now = getattr(spec, field)
        for value in values[: values.index(now)] if now in values else values:
            if field == "way" and value == "equal":
                rows = max(1, max(spec.splits[0]))
                yield spec.but(way="equal", splits=((rows,) * spec.workers,))
            else:
                yield spec.but(**{field: value})


def _simpler_steps(step: Step) -> Iterator[Step]:
    for field in ("before", "after"):
        pieces = getattr(step, field)
        for number, piece in enumerate(pieces):
            yield replace(step, **{field: _without(pieces, number)})
            for simpler in _simpler_piece(piece):
                changed = (*pieces[:number], simpler, *pieces[number + 1 :])
                yield replace(step, **{field: changed})
    for kind in ("plain", "several", "window"):
        if step.gradients["kind"] == kind:
            break
        yield replace(step, gradients={**step.gradients, "kind": kind})
    if step.update != "step":
        yield replace(step, update="step")
    for simpler in _simpler_piece(step.gradients):
        yield replace(step, gradients=simpler)


def _simpler_piece(piece: Piece) -> Iterator[Piece]:
    for name in ("i", "rank"):
        if piece.get(name):
            yield {**piece, name: 0}


def _without(pieces: tuple[Piece, ...], number: int) -> tuple[Piece, ...]:
    return pieces[:number] + pieces[number + 1 :]


def _fewer_ranks_and_rows(spec: Spec) -> Iterator[Spec]:
    for workers in range(1, spec.workers):
        splits = tuple(split[:workers] for split in spec.splits)
        if all(any(split) for split in splits):
            yield spec.but(workers=workers, splits=splits)
    if len(spec.splits) > 1:
        yield from (spec.but(splits=(split,)) for split in spec.splits)
    even = tuple((max(split),) * len(split) for split in spec.splits)
    if even != spec.splits:
        yield spec.but(splits=even)
    fewer = tuple(tuple(min(count, 1) for count in split) for split in spec.splits)
    if fewer != spec.splits:
        yield spec.but(splits=fewer)
