# SPDX-License-Identifier: Apache-2.0
"""What one rank saw. Written while it trains, compared with the others' afterwards.

Nothing is communicated while a program is watched: each rank keeps its own ledger, and what
happened in which step is keyed so that ledgers can be laid side by side (`lockstep.audit.world`).
So the audit cannot hang a program, take part in its deadlock or disturb the order of its
collectives, and one rank that does something else than its peers is simply seen.

A ledger stays small: `is_detailed` keeps the first steps and then fewer and fewer, the same
ones on every rank. Replicas that drifted apart stay apart, so a later look still finds it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, Final

from lockstep.audit.finding import Place
from lockstep.audit.prints import Fingerprint, Sketch

FIRST_STEPS: Final = 64
"""This many steps are kept whole in `full` mode, then two of the next as many, and two each time
that a run has doubled; `benchmarks/audit.py` measures what they cost."""

FIRST_STEPS_WATCH: Final = 8

MODELS_SENT: Final = 64
"""So many messages as large as a model are written down."""

SCATTERING: Final = ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
"""Collectives that leave each rank a part of the sum."""


def is_detailed(step: int, first: int, rarest: int | None = None) -> bool:
    """Is step `step`, from 0, one that is written down in detail?

    Args:
        first: so many are, one after the other.
        rarest: at least every `rarest`-th is, soon no others; None: they become rarer for ever.
    """
    if step < first:
        return True
    doublings: int = (step // first).bit_length()
    if rarest is None:
        return step % max(1, (first << doublings) // 4) == 0
    # Twice as fast: a run that is watched to its end pays for each of them.
    return step % min(1 << 2 * doublings, rarest) == 0


def thin_out(steps: list[Step], keep: int) -> None:
    """Leave every second step out when there are more than `keep`; the first and the last stay.

    The same ones on every rank that wrote down the same steps.
    """
    if len(steps) > keep:
        head = keep // 4
        steps[head:-1] = steps[head:-1:2]


@dataclass
class Term:
    """A reduction at the end of a loss: `count` elements, each with weight `weight` in the loss.

    `kind` is ``mean`` or ``sum`` of how the elements came together; `divisor` is a count by
    which the sum was divided in the user's own arithmetic.
    """

    kind: str
    weight: float
    count: float
    op: str


@dataclass
class Backward:
    """One ``backward()`` or ``autograd.grad()``.

    `factor` is what the whole loss was multiplied by in the end, and `terms` what it consists of;
    `targets` stand for what it compares with, and `heads` are the parameters that it was computed
    with last.
    By optimizer: `local` is what it brought to each parameter, as autograd delivered it; `before`
    and `gradients` are what its parameters' gradients were when it began and when it returned.
    `touched` are the optimizers some of whose gradients it wrote. `left` are the norms of all
    gradients of each model, and of all together, when it returned; only in programs that scatter
    sums of gradients.
    """

    kind: str
    where: list[Place]
    loss: float | None = None
    terms: list[Term] = field(default_factory=list)
    factor: float | None = None
    targets: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    wrappers: dict[str, dict[str, Any]] = field(default_factory=dict)
    gathered: list[dict[str, Any]] = field(default_factory=list)
    local: dict[str, Sketch] = field(default_factory=dict)
    before: dict[str, Fingerprint] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    gradients: dict[str, Fingerprint] = field(default_factory=dict)


@dataclass
class Collective:
    """One call of a function of ``torch.distributed``.

    `parameter` is the one whose gradient was communicated, `weights` the one that was itself.
    """

    op: str
    where: list[Place]
    group: list[int]
    shape: list[int] = field(default_factory=list)
    reduction: str | None = None
    parameter: str | None = None
    weights: str | None = None
    before: float | None = None
    after: float | None = None
    in_backward: bool = False


@dataclass
class Step:
    """One optimizer step.

    `random` stands for the states of torch's and numpy's default generators; `inputs` for what the
    forwards of wrappers and of
    fully sharded models were given (``hash``, and tensor by tensor ``arguments``), and the
    generators' states then (``random``, ``where``); `fed`, `fed_shapes` and `fed_arguments` for
    what the first module that was called was given, at `fed_where`, and
    `mode` for which of its parts were in training mode. `frozen` are modules without a trained
    parameter that were called (``module``, ``names``, those of them that an optimizer ``held``,
    ``prints``, ``where``). `unreduced` are the parameters whose gradients ``fully_shard`` still
    kept back (``names``, the ``backwards`` that left them, ``where``), and `divided` what the
    program had it divide others by (``factor``) when it adds them up over so many ``ranks``.
    `unowned` have gradients and no optimizer; where there are any, `beside` tells of all parameters
    of modules that have one: ``names``, ``sizes``, ``weights``, ``gradients``, those that are
    ``left_out`` of models held otherwise, the collectives ``within`` the step, and whether ``all``
    are there. `not_finite` are the parameters whose gradients held NaN or infinity.
    """

    number: int
    where: list[Place]
    entry: Fingerprint | None = None
    gradients: Fingerprint | None = None
    not_finite: list[str] = field(default_factory=list)
    exit: Fingerprint | None = None
    hyper: list[dict[str, float]] = field(default_factory=list)
    state: Fingerprint | None = None
    scale: float | None = None
    backwards: list[Backward] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    clips: list[dict[str, Any]] = field(default_factory=list)
    bypasses: list[list[Place]] = field(default_factory=list)
    unowned: list[str] = field(default_factory=list)
    beside: dict[str, Any] = field(default_factory=dict)
    inside_backward: bool = False
    has_closure: bool = False
    random: dict[str, int] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    fed: int | None = None
    fed_shapes: list[list[int]] = field(default_factory=list)
    fed_arguments: list[dict[str, Any]] = field(default_factory=list)
    fed_where: list[Place] = field(default_factory=list)
    mode: dict[str, Any] = field(default_factory=dict)
    frozen: list[dict[str, Any]] = field(default_factory=list)
    unreduced: dict[str, Any] = field(default_factory=dict)
    divided: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class Parameter:
    """A parameter that an optimizer holds.

    `group` are the ranks that hold it, or the same piece of it, as replicas; None: all of them, or
    none if it is `sharded`.
    """

    name: str
    shape: list[int]
    dtype: str
    wrapper: str | None = None
    group: list[int] | None = None
    sharded: bool = False
    local: bool = False
    in_module: bool = True
    samples: int = 0


@dataclass
class Track:
    """One optimizer: what it holds, and its steps."""

    key: str
    optimizer: str
    where: list[Place]
    parameters: list[Parameter] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    count: int = 0
    state_names: list[str] = field(default_factory=list)


@dataclass
class Loading:
    """One iteration over a data loader: which samples, or what the batches held.

    `part` stands for the samples that a ``Subset`` has, and `samples` are the `indices` in the
    dataset that it was taken from. `rows` tells, for each tensor of a batch, what the samples of
    the first `indices` held, and `shapes` are those of the first batch. What a sampler says of
    itself are its `replicas` and whether it `shuffles`; `step` says how many steps there had been.
    `used` are the places of the batches that a backward followed, and `has_ended` tells whether the
    program read on until there were no more. `drawn` tells of each worker what
    its generators began with, as the loader or a ``worker_init_fn``, at `seeded_at`, left them, and
    what its first samples drew; see `lockstep.audit.probe.worker_draws`.
    """

    key: str
    where: list[Place]
    indices: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    sampler: str = ""
    replicas: int | None = None
    shuffles: bool | None = None
    part: int | None = None
    size: int | None = None
    training: bool = False
    has_ended: bool = False
    step: int = 0
    worker_seed: int | None = None
    drawn: list[dict[str, Any]] = field(default_factory=list)
    seeded_at: list[Place] = field(default_factory=list)


@dataclass
class Ledger:
    """Everything that one rank saw."""

    rank: int = 0
    world_size: int = 1
    started_group: bool = False
    tracks: list[Track] = field(default_factory=list)
    loadings: list[Loading] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    calls: list[Collective] = field(default_factory=list)
    calls_made: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    failure: dict[str, Any] | None = None
    stack: list[Place] = field(default_factory=list)
    stuck_in: Collective | None = None
    exit_code: int | None = None
    failed_at: float | None = None

    def to_bytes(self) -> bytes:
        """JSON: what a rank writes is read by another process, and must not run code there."""
        return json.dumps(_packed(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """The inverse of `to_bytes`."""
        ledger = _unpacked(json.loads(data))
        assert isinstance(ledger, cls)
        return ledger


_CLASSES: Final = {
    c.__name__: c
    for c in (Place, Term, Backward, Collective, Step, Parameter, Track, Loading, Ledger)
}

_FIELDS: Final = {name: {f.name for f in fields(c)} for name, c in _CLASSES.items()}


def _packed(value: Any) -> Any:
    if isinstance(value, Fingerprint):
        return {"~": "Fingerprint", **value.as_json()}
    if isinstance(value, Sketch):
        return {"~": "Sketch", **value.as_json()}
    kind = type(value).__name__
    if kind in _CLASSES:
        return {"~": kind, **{f.name: _packed(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, dict):
        return {str(name): _packed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(item) for item in value]
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.pop("~", None)
    if kind == "Fingerprint":
        return Fingerprint.from_json(value)
    if kind == "Sketch":
        return Sketch.from_json(value)
    filled = {name: _unpacked(item) for name, item in value.items()}
    if kind is None:
        return filled
    # A ledger that an earlier version has written may have fields that are gone.
    return _CLASSES[kind](**{name: x for name, x in filled.items() if name in _FIELDS[kind]})
