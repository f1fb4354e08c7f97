# SPDX-License-Identifier: Apache-2.0
"""Computes steps of a run again, and compares them with the run's log.

The gradient of a shard is a function of the weights, the seed, the epoch, the step and the shard.
So a new trainer with the arguments of the run, which loads the newest checkpoint before a step and
trains up to it, has the weights that the run had: the same bits under ``reproducible=True``, with
the same kernels and as many threads.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep import checkpoint
from lockstep.checkpoint.rotation import Rotation
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.trainer.logged_run import LoggedRun
from lockstep.trainer.record_listener import RecordListener
from lockstep.trainer.run_log import describe_machine, known_checksums, step_line
from lockstep.worker import weight_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from lockstep.metrics.step_log import StepRecord
    from lockstep.weight_hashes import PartHash

_ARGUMENTS: Final = (
    "num_shards",
    "seed",
    "precision",
    "scheduler_step_freq",
    "wrap_ddp",
    "add_dist_sampler",
    "bucket_cap_mb",
    "reproducible",
    "accumulate",
    "clip_grad_norm",
    "check_finite",
)

_ROUNDING: Final = 1e-6
"""Workers add up means of losses in float32, in an order of their own."""


@dataclass(frozen=True)
class StepDifference:
    """What is not as in the log at one step.

    Attributes:
        step: the number of the step in the run.
        what: the data, a learning rate, a shard's loss, or a part of the weights.
        logged: the value in the log.
        got: the value now.
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
class ReplayReport:
    """What came of a replay; it prints as a few lines.

    Attributes:
        step: the step that was to be computed again.
        at: its epoch, and the number of its global batch in it.
        start: the path of the checkpoint that the replay began with; None: with `setup`.
        num_computed: how many steps were computed again.
        same_bits: the log's hashes of these steps are those of now, and so is all else that it
            knows of them; None if nothing differs, and it has no hash of them.
        num_compared: how many hashes were compared: of shards' losses and of parts of the weights.
        differences: of the first step that is not as in the log, and of `step`.
        reasons: why bits may differ here, in words.
        seconds: how long it took.
    """

    step: int
    at: tuple[int, int]
    start: str | None
    num_computed: int
    same_bits: bool | None
    num_compared: int
    differences: Sequence[StepDifference]
    reasons: Sequence[str]
    seconds: float

    def __str__(self) -> str:
        begun = self.start or "the beginning of the run"
        verdicts = {
            True: f"same bits: {self.num_compared} hashes of losses and weights are as in the log",
            False: "not the same bits",
            None: "nothing was compared: the log has no hash of these steps, as where weights are"
            " in shards",
        }
        lines = [
            f"step {self.step}: global batch {self.at[1]} of epoch {self.at[0]}",
            f"from {begun}: {self.num_computed} steps in {self.seconds:.1f} s",
            verdicts[self.same_bits],
            *map(str, self.differences),
            *(f"note: {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)


class StepComparison(RecordListener):
    """Compares each step that a trainer computes with the log.

    Args:
        logged: the log.
        shard: compare this shard's loss alone; None for all.

    Attributes:
        names: for each part of the weights the names of the tensors in it.
        differences: by step, of those that differ.
        num_compared: hashes that were compared.
    """

    def __init__(self, logged: LoggedRun, shard: int | None) -> None:
        self._logged = logged
        self._shard = shard
        self.names: Sequence[Sequence[str]] = ()
        self.differences: dict[int, list[StepDifference]] = {}
        self.num_compared = 0

    def on_record(
        self, step: int, metrics: Mapping[str, Any], records: Sequence[StepRecord | None]
    ) -> None:
        if step not in self._logged.steps:
            return
        known = [each for each in records if each is not None]
        line, logged = step_line(step, metrics, known), self._logged.steps[step].line
        parts = [part for record in known for part in record.weights]
        found = [
            *_compare_place(step, logged, line),
            *self._compare_losses(step, logged, line),
            *self._compare_weights(step, parts),
        ]
        if found:
            self.differences[step] = found

    def _compare_losses(
        self, step: int, logged: Mapping[str, Any], line: Mapping[str, Any]
    ) -> Iterator[StepDifference]:
        """The shards whose losses have other bits; the metrics, where no shard's loss is known."""
        before, now = known_checksums(logged), known_checksums(line)
        for number in sorted(before.keys() & now.keys()):
            if self._shard in (None, number):
                self.num_compared += 1
                if before[number] != now[number]:
                    what = f"the bits of the loss of shard {number}, as a checksum"
                    yield StepDifference(step, what, before[number], now[number])
        if before:
            return
        for name, value in logged["metrics"].items():
            got = line["metrics"].get(name)
            if got is not None and not _is_close(value, got):
                yield StepDifference(step, f"the mean of {name!r}", value, got, _apart(value, got))

    def _compare_weights(self, step: int, parts: Sequence[PartHash]) -> Iterator[StepDifference]:
        logged = self._logged.steps[step].weights
        for part in parts:
            if part.part not in logged:
                continue
            self.num_compared += 1
            bits, norm = logged[part.part]
            if bits == f"{part.bits:016x}":
                continue
            names = ", ".join(self.names[part.part])
            yield StepDifference(
                step,
                f"the weights after it, in {names}: their norm",
                norm,
                part.norm,
                _apart(norm, part.norm),
            )


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def _is_close(one: float, other: float) -> bool:
    return _apart(one, other) <= _ROUNDING or (math.isnan(one) and math.isnan(other))


def _compare_place(
    step: int, logged: Mapping[str, Any], line: Mapping[str, Any]
) -> Iterator[StepDifference]:
    # The number of samples is left out: those of a worker that died are missing in the log.
    words = {"at": "its epoch and global batch", "lr": "the learning rates"}
    for key, what in words.items():
        if None not in (logged[key], line[key]) and logged[key] != line[key]:
            yield StepDifference(step, what, logged[key], line[key])


def replay_run(
    make_trainer: Callable[..., Any],
    *,
    folder: str | os.PathLike[str],
    step: int,
    config: Mapping[str, Any] | None = None,
    num_workers: int = 1,
    shard: int | None = None,
    around_step: Callable[[Any], AbstractContextManager[None]] | None = None,
) -> ReplayReport:
    """Compute a step of a run again, and compare it, and those before it, with the log.

    Args:
        make_trainer: makes a `TorchTrainer` of the run's operator.
        folder: the run's `checkpoint_dir`, which is read and not changed.
        step: global batches since the run began, this one included.
        config: entries over those of the config in the log.
        num_workers: processes that compute it.
        shard: compare this shard's loss alone.
        around_step: given the trainer, a context around the computation of step `step`.

    Raises:
        CheckpointError: there is no log, or no checkpoint in front of the step can be read.
        ConfigurationError: the log does not know the step, or lacks keys of the config; the run
            has no such shard.
    """
    logged = LoggedRun.read(folder)
    program = program_of(logged, step, folder)
    config = {**logged.config_of(step), **(config or {})}
    _refuse_incomplete(program, config, shard)
    began, comparison = time.monotonic(), StepComparison(logged, shard)
    given = program["arguments"]
    with (
        _torch_threads(program["machine"]["threads"]),
        make_trainer(
            config=config,
            num_workers=num_workers,
            num_cpus_per_worker=given["threads"] or 1,
            # A lone worker has nobody to synchronise with; fsdp reads checkpoints of its own form.
            sync=given["sync"] if num_workers > 1 or given["sync"] == "fsdp" else "replicate",
            # What ran on a GPU is computed where there is none, too; the reverse would differ.
            use_gpu="auto" if given["use_gpu"] else False,
            audit="off",
            callbacks=[comparison],
            **{name: given[name] for name in _ARGUMENTS},
        ) as trainer,
    ):
        comparison.names = trainer.apply_all_operators(weight_names)[0]
        start, first = _load_newest(trainer, folder, step)
        if step - 1 > first:
            trainer.train(num_steps=step - 1 - first)
        with nullcontext() if around_step is None else around_step(trainer):
            trainer.train(num_steps=1)
        device, threads = trainer._workers.start_reports[0].device, trainer._workers.spec.threads
        machine = describe_machine(device, threads)
    differing = sorted(comparison.differences)
    shown = {*differing[:1], *({step} & {*differing})}
    return ReplayReport(
        step=step,
        at=tuple(logged.steps[step].line["at"] or (0, 0)),
        start=start,
        num_computed=step - first,
        same_bits=False if differing else (True if comparison.num_compared else None),
        num_compared=comparison.num_compared,
        differences=[each for n in sorted(shown) for each in comparison.differences[n]],
        reasons=[*_reasons(logged, program, machine, first, step)] if differing else [],
        seconds=time.monotonic() - began,
    )


def program_of(logged: LoggedRun, step: int, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What the program that computed a step has told of itself.

    Raises:
        ConfigurationError: the log does not know the step.
    """
    if step in logged.steps:
        return logged.program_of(step)
    known = f"steps 1 to {max(logged.steps)}" if logged.steps else "no step"
    raise ConfigurationError(
        "the log does not know this step",
        where=os.path.abspath(folder),
        expected=known,
        got=f"step {step}",
    )


def _refuse_incomplete(
    program: Mapping[str, Any], config: Mapping[str, Any], shard: int | None
) -> None:
    missing = [key for key in program["lost"] if key not in map(str, config)]
    if missing:
        raise ConfigurationError(
            "the log could not keep all of the run's config",
            got=f"no {', '.join(missing)}: a log keeps numbers, strings and containers of them",
            fix=f"lockstep replay ... --set {missing[0]}=...",
        )
    shards = program["arguments"]["num_shards"]
    if shard is not None and not 0 <= shard < shards:
        raise ConfigurationError(
            "the run has no such shard", expected=f"0 to {shards - 1}", got=f"shard {shard}"
        )


@contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    """Compute in this process with as many threads as the run: sums depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load_newest(trainer: Any, folder: str | os.PathLike[str], step: int) -> tuple[str | None, int]:
    """Load the newest good checkpoint in front of a step; its path and its own step.

    Raises:
        CheckpointError: there are some, and none of them can be read.
    """
    rotation = Rotation(os.path.abspath(folder), keep=1, read=checkpoint.read)
    refused: CheckpointError | None = None
    for each in reversed(rotation.steps()):
        if each >= step:
            continue
        try:
            trainer.load(rotation.path_of(each))
        except CheckpointError as error:
            refused = error
        else:
            return rotation.path_of(each), each
    if refused is not None:
        raise refused
    return None, 0


def _reasons(
    logged: LoggedRun,
    program: Mapping[str, Any],
    machine: Mapping[str, Any],
    first: int,
    step: int,
) -> Iterator[str]:
    """Why bits may differ, as far as the log tells."""
    for changed, by in logged.changes:
        if first <= changed < step and (changed or by != "load_state_dict"):
            yield f"after step {changed} the program called {by}, which a replay does not"
    for key, value in program["machine"].items():
        if machine.get(key) != value:
            yield f"{key} was {value}, and is {machine.get(key)}"
    given = program["arguments"]
    if given["num_workers"] > 1 and not given["reproducible"]:
        yield "without reproducible=True N workers add gradients in another order: to rounding"
