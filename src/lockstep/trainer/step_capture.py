# SPDX-License-Identifier: Apache-2.0
"""`StepCapture`: all that a step is computed from, noted while a replay computes it again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lockstep.content_digest import content_digest
from lockstep.data.batch_rows import slice_rows
from lockstep.errors import NotShardableError
from lockstep.operator.registration import registered_parts
from lockstep.trainer.run_log import step_line
from lockstep.trainer.step_differences import StepDifference, compare_lines
from lockstep.trainer.step_examination import name_of_sample, num_rows
from lockstep.trainer.step_inspection import StepInspection
from lockstep.weight_hashes import NUM_PARTS, WeightHashes, read_hashes
from lockstep.worker import weight_names, weight_slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lockstep.metrics.step_log import StepRecord
    from lockstep.operator.shard_batch import ShardBatch
    from lockstep.weight_hashes import PartHash

_MOST_NAMES: Final = 8


@dataclass
class CapturedStep:
    """What a step is computed from, and its line of the log.

    Attributes:
        weights: hashes of all parts of the weights and buffers before it.
        names: for each part the names of the tensors in it.
        samples: by shard, the names of the samples: their places in the dataset, if it has any.
        contents: by shard, a digest of each sample; of a batch that cannot be sliced, its own.
        seeds: by shard, what its random numbers start with.
        settings: of the optimizers' parameter groups, by name.
        line: see `lockstep.trainer.run_log`.
    """

    weights: Sequence[PartHash] = ()
    names: Sequence[Sequence[str]] = ()
    samples: dict[int, list[str]] = field(default_factory=dict)
    contents: dict[int, list[str]] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    line: Mapping[str, Any] = field(default_factory=dict)


class StepCapture(StepInspection):
    """Captures the steps that a trainer of one process computes while `around` is entered.

    An operator with a `train_epoch` of its own hands over no step: it captures their lines alone.

    Args:
        steps: their numbers.

    Attributes:
        captured: by number.
    """

    def __init__(self, steps: range) -> None:
        super().__init__(steps)
        self.captured: dict[int, CapturedStep] = {}

    @contextmanager
    def around(self, trainer: Any) -> Iterator[None]:
        operator = trainer.get_local_operator()
        train_batch, run = operator.train_batch, registered_parts(operator)
        names, hashes = weight_names(operator), WeightHashes(lambda: weight_slots(run))

        def capture(batch: Any, batch_info: Mapping[str, Any]) -> Any:
            state = operator._lockstep
            shards = state.global_batch.shards
            self.captured[state.committed + 1] = CapturedStep(
                weights=read_hashes(hashes.take(range(NUM_PARTS))),
                names=names,
                samples={s.shard: _names_of_samples(s) for s in shards},
                contents={s.shard: _digests_of_samples(s) for s in shards},
                seeds={s.shard: s.seed for s in shards},
                settings=_settings_of(run.optimizers),
            )
            return train_batch(batch, batch_info)

        operator.train_batch = capture
        try:
            yield
        finally:
            del operator.train_batch

    def on_record(
        self, step: int, metrics: Mapping[str, Any], records: Sequence[StepRecord | None]
    ) -> None:
        if step in self.steps:
            known = [each for each in records if each is not None]
            captured = self.captured.setdefault(step, CapturedStep())
            captured.line = step_line(step, metrics, known)


def _names_of_samples(shard: ShardBatch) -> list[str]:
    try:
        rows = num_rows(shard.batch, shard)
    except NotShardableError:
        rows = 1
    return [name_of_sample(shard, row, rows) for row in range(rows)]


def _digests_of_samples(shard: ShardBatch) -> list[str]:
    batch, num_samples = shard.batch, shard.num_samples
    try:
        numbers = range(num_rows(batch, shard))
        rows = [slice_rows(batch, slice(n, n + 1), num_samples) for n in numbers]
    except NotShardableError:
        return [content_digest(batch)]
    return [content_digest(row) for row in rows]


def _settings_of(optimizers: Sequence[Any]) -> dict[str, str]:
    return {
        f"{key} of group {number} of optimizer {place} ({type(optimizer).__name__})": repr(value)
        for place, optimizer in enumerate(optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }


def compare_captured(
    step: int, ours: CapturedStep, theirs: CapturedStep, *, have_bits: bool
) -> list[StepDifference]:
    """The causes that two computations of a step differ by; else in what they came out different.

    What comes first may be the reason for what comes later.

    Args:
        have_bits: both have the bits of the runs; else their weights and results say nothing of
            those.
    """
    causes: list[StepDifference] = []
    # An operator with a `train_epoch` of its own hands nothing over.
    if ours.settings and theirs.settings:
        causes = [
            *(_compare_weights(step, ours, theirs) if have_bits else ()),
            *_compare_samples(step, ours, theirs),
            *_compare_content(step, ours, theirs),
            *_compare_seeds(step, ours.seeds, theirs.seeds),
            *_compare_settings(step, ours.settings, theirs.settings),
        ]
    if causes or not (have_bits and ours.line and theirs.line):
        return causes
    return [*compare_lines(ours.line, theirs.line, names=ours.names).differences]


def _compare_weights(
    step: int, ours: CapturedStep, theirs: CapturedStep
) -> Iterator[StepDifference]:
    if ours.names != theirs.names:
        one, other = ({name for part in each.names for name in part} for each in (ours, theirs))
        what = "the weights and buffers that there are" if one != other else "their sizes"
        yield StepDifference(step, what, _listed(sorted(one - other)), _listed(sorted(other - one)))
        return
    for mine, their in zip(ours.weights, theirs.weights, strict=True):
        if mine.bits != their.bits:
            what = f"the weights before it, in {', '.join(ours.names[mine.part])}: their norm"
            yield StepDifference(step, what, mine.norm, their.norm)


def _compare_samples(
    step: int, ours: CapturedStep, theirs: CapturedStep
) -> Iterator[StepDifference]:
    if ours.samples.keys() != theirs.samples.keys():
        what = "the number of shards"
        yield StepDifference(step, what, len(ours.samples), len(theirs.samples))
    for shard in sorted(ours.samples.keys() & theirs.samples.keys()):
        one, other = ours.samples[shard], theirs.samples[shard]
        if one != other:
            what = f"the samples of shard {shard}"
            yield StepDifference(step, what, _listed(one), _listed(other))


def _compare_content(
    step: int, ours: CapturedStep, theirs: CapturedStep
) -> Iterator[StepDifference]:
    """The samples that were read from the same places, and have other content."""
    for shard, names in ours.samples.items():
        if theirs.samples.get(shard) != names:
            continue
        pairs = zip(ours.contents[shard], theirs.contents[shard], strict=False)
        for row, (one, other) in enumerate(pairs):
            if one != other:
                what = f"the content of {names[row]}, in shard {shard}"
                yield StepDifference(step, what, None, None)


def _compare_seeds(
    step: int, ours: Mapping[int, int], theirs: Mapping[int, int]
) -> Iterator[StepDifference]:
    for shard in sorted(ours.keys() & theirs.keys()):
        if ours[shard] != theirs[shard]:
            what = f"the seed of the random numbers of shard {shard}"
            yield StepDifference(step, what, ours[shard], theirs[shard])


def _compare_settings(
    step: int, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> Iterator[StepDifference]:
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name), theirs.get(name)
        if one != other:
            yield StepDifference(step, name, one, other)


def _listed(names: Sequence[str]) -> str:
    """The first few of them: a few hundred names tell nobody more."""
    more = f", ... {len(names)} in all" if len(names) > _MOST_NAMES else ""
    return f"[{', '.join(names[:_MOST_NAMES])}{more}]"
