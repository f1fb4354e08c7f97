# SPDX-License-Identifier: Apache-2.0
"""Compares what two computations of one step have left: two lines of logs of runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lockstep.trainer.run_log import known_checksums
from lockstep.weight_hashes import NUM_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_ROUNDING: Final = 1e-6
"""Means depend on the order in which the workers add up, and some logs have them in float32."""


@dataclass(frozen=True)
class StepDifference:
    """In what two computations of one step differ.

    Attributes:
        step: the number of the step in the run.
        what: the data, a learning rate, a shard's loss, or a part of the weights.
        logged: the value in the log; of two runs that in the first one.
        got: the value now; of two runs that in the second one. Both are None where `what` says it.
        relative: how far apart they are, beside the larger one; None where only bits are known.
    """

    step: int
    what: str
    logged: Any
    got: Any
    relative: float | None = None

    def __str__(self) -> str:
        apart = "" if self.relative is None else f" ({self.relative:.1e} apart)"
        return f"step {self.step}: {self.what}: {self.got} instead of {self.logged}{apart}"


@dataclass(frozen=True)
class LineComparison:
    """What came of the comparison of two lines.

    Attributes:
        differences: what differs, the likeliest cause first.
        shards: the shards of whose losses hashes were compared.
        num_hashes: hashes that were compared: of these losses, and of parts of the weights.
        num_means: means of metrics that were compared, where no shard's loss is known.
    """

    differences: Sequence[StepDifference]
    shards: Sequence[int]
    num_hashes: int
    num_means: int


def compare_lines(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    names: Sequence[Sequence[str]] = (),
    shard: int | None = None,
) -> LineComparison:
    """Compare two lines of one step.

    Args:
        before: the line of one computation, see `lockstep.trainer.run_log`.
        now: of the other one.
        names: for each part of the weights the names of the tensors in it, where they are known.
        shard: compare this shard's loss alone; None for all.
    """
    losses, shards = _compare_losses(before, now, shard)
    has_both = known_checksums(before).keys() & known_checksums(now).keys()
    means, num_means = ([], 0) if has_both else _compare_means(before, now)
    weights, num_weights = _compare_weights(before, now, names)
    found = [*_compare_place(before, now), *losses, *means, *weights]
    return LineComparison(found, shards, len(shards) + num_weights, num_means)


def _compare_place(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[StepDifference]:
    # The number of samples is left out: those of a worker that died are missing in the log.
    words = {"at": "its epoch and global batch", "lr": "the learning rates"}
    for key, what in words.items():
        if None not in (before[key], now[key]) and before[key] != now[key]:
            yield StepDifference(before["step"], what, before[key], now[key])


def _compare_losses(
    before: Mapping[str, Any], now: Mapping[str, Any], shard: int | None
) -> tuple[list[StepDifference], list[int]]:
    """The shards whose losses have other bits, and those that were compared."""
    step, ours, theirs = before["step"], known_checksums(before), known_checksums(now)
    numbers = [each for each in sorted(ours.keys() & theirs.keys()) if shard in (None, each)]
    what = "the bits of the loss of shard {}, as a checksum"
    found = [
        StepDifference(step, what.format(each), ours[each], theirs[each])
        for each in numbers
        if ours[each] != theirs[each]
    ]
    return found, numbers


def _compare_means(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[StepDifference], int]:
    """The metrics whose means are further apart than rounding, and how many were compared."""
    pairs = [
        (name, value, now["metrics"][name])
        for name, value in before["metrics"].items()
        if now["metrics"].get(name) is not None
    ]
    found = [
        StepDifference(before["step"], f"the mean of {name!r}", one, other, _apart(one, other))
        for name, one, other in pairs
        if not _is_close(one, other)
    ]
    return found, len(pairs)


def _compare_weights(
    before: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> tuple[list[StepDifference], int]:
    logged = {part: (bits, norm) for part, bits, norm in before["w"]}
    both = [each for each in now["w"] if each[0] in logged]
    found: list[StepDifference] = []
    for part, bits, norm in both:
        their_bits, their_norm = logged[part]
        if bits != their_bits:
            where = ", ".join(names[part]) if names else f"part {part} of {NUM_PARTS}"
            what = f"the weights after it, in {where}: their norm"
            found.append(
                StepDifference(before["step"], what, their_norm, norm, _apart(their_norm, norm))
            )
    return found, len(both)


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def _is_close(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return _apart(one, other) <= _ROUNDING
