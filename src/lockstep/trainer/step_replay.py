# SPDX-License-Identifier: Apache-2.0
"""Computes steps of a run again, and compares them with the run's log.

The gradient of a shard is a function of the weights, the seed, the epoch, the step and the shard.
So a new trainer with the arguments of the run, which loads the newest checkpoint before a step and
trains up to it, has the weights that the run had: the same bits under ``reproducible=True``, with
the same kernels and as many threads.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep import checkpoint
from lockstep.checkpoint.rotation import Rotation
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.operator.replayed_class import replayed_class
from lockstep.trainer.logged_run import LoggedRun
from lockstep.trainer.record_listener import ON_LOAD, RecordListener
from lockstep.trainer.run_log import MOST_CHECKSUMS, describe_machine, step_line
from lockstep.trainer.step_differences import LineComparison, StepDifference, compare_lines
from lockstep.trainer.step_inspection import StepInspection
from lockstep.worker import run_counts, weight_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lockstep.metrics.step_log import StepRecord
    from lockstep.operator import TrainingOperator

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

_BEHIND: Final = "replay a step behind the first checkpoint in this directory"


@dataclass(frozen=True)
class ReplayReport:
    """What came of a replay; it prints as a few lines.

    Attributes:
        step: the step that was to be computed again.
        at: its epoch, and the number of its global batch in it.
        start: the path of the checkpoint that the replay began with; None: with `setup`.
        num_computed: how many steps were computed again.
        same_bits: the log's hashes of these steps are those of now, and so is all else that it
            knows of them; None if nothing differs, and no hash of `step` was compared, or none of
            the loss of the shard that was asked for.
        num_compared: how many hashes were compared: of shards' losses and of parts of the weights.
        num_means: how many means of metrics were compared, where the log has no hash of losses.
        differences: of the first step that is not as in the log, and of `step`.
        reasons: why bits may differ here, or are not known, in words.
        seconds: how long it took.
    """

    step: int
    at: tuple[int, int]
    start: str | None
    num_computed: int
    same_bits: bool | None
    num_compared: int
    num_means: int
    differences: Sequence[StepDifference]
    reasons: Sequence[str]
    seconds: float

    def __str__(self) -> str:
        begun = self.start or "the beginning of the run"
        alike = f"{self.num_compared} hashes of losses and weights are as in the log"
        verdicts = {
            True: f"same bits: {alike}",
            False: "not the same bits",
            None: f"bits are not known: {alike}, and {self.num_means} means, to rounding",
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
        compared: by step, what came of it; of the steps that the log has.
        seen: the last step on record.
    """

    def __init__(self, logged: LoggedRun, shard: int | None) -> None:
        self._logged = logged
        self._shard = shard
        self.names: Sequence[Sequence[str]] = ()
        self.compared: dict[int, LineComparison] = {}
        self.seen = 0

    def on_record(
        self, step: int, metrics: Mapping[str, Any], records: Sequence[StepRecord | None]
    ) -> None:
        self.seen = step
        if step not in self._logged.steps:
            return
        line = step_line(step, metrics, [each for each in records if each is not None])
        self.compared[step] = compare_lines(
            self._logged.steps[step].line, line, names=self.names, shard=self._shard
        )

    def unknown_of(self, step: int) -> Iterator[str]:
        """Why it is not known whether the bits of `step` are those of the log, if it is not."""
        compared = self.compared.get(step)
        if compared is None:
            yield f"step {step} left gradients that no optimizer used before the epoch's end"
        elif self._shard is None and not compared.num_hashes:
            yield f"there is no hash of step {step}, as where weights are in shards"
        elif self._shard is not None and self._shard not in compared.shards:
            yield f"there is no hash of the loss of shard {self._shard} in step {step}"
            yield f"the log has those of default loops, and of shards 0 to {MOST_CHECKSUMS - 1}"


def trainer_maker(
    trainer_cls: Callable[..., Any],
    operator_cls: type[TrainingOperator],
    hook: Callable[[], Any] | None = None,
    *,
    is_here: bool = False,
) -> Callable[..., Any]:
    """What makes a `TorchTrainer` for a replay.

    Args:
        trainer_cls: `TorchTrainer`.
        operator_cls: the run's.
        hook: the run's `initialization_hook`.
        is_here: the run goes on in this process, and its objects are not the replay's.
    """
    return partial(
        trainer_cls,
        training_operator_cls=replayed_class(operator_cls, on_copies=is_here),
        initialization_hook=hook,
    )


def replay_run(
    make_trainer: Callable[..., Any],
    *,
    folder: str | os.PathLike[str],
    step: int,
    config: Mapping[str, Any] | None = None,
    num_workers: int = 1,
    shard: int | None = None,
    inspection: StepInspection | None = None,
) -> ReplayReport:
    """Compute a step of a run again, and compare it, and those before it, with the log.

    Args:
        make_trainer: see `trainer_maker`.
        folder: the run's `checkpoint_dir`, which is read and not changed.
        step: global batches since the run began, this one included.
        config: entries over those of the config in the log, also within its mappings.
        num_workers: processes that compute it.
        shard: compare this shard's loss alone.
        inspection: looks at `step`, and maybe at steps around it, which are compared as well.

    Raises:
        CheckpointError: there is no log, or no checkpoint in front of the step can be read.
        ConfigurationError: the log does not know the step, or lacks keys of the config; the run
            has no such shard.
    """
    logged = LoggedRun.read(folder)
    program = program_of(logged, step, folder)
    config = _merged(logged.config_of(step), config or {})
    _refuse_incomplete(program, config, shard)
    began, comparison = time.monotonic(), StepComparison(logged, shard)
    inspection = inspection or StepInspection(range(step, step + 1))
    until, last = inspection.steps[0] - 1, inspection.steps[-1]
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
            callbacks=[comparison, inspection],
            **{name: given[name] for name in _ARGUMENTS},
        ) as trainer,
    ):
        comparison.names = trainer.apply_all_operators(weight_names)[0]
        start, first = _load_newest(trainer, folder, until + 1, logged.programs[0]["from"])
        if until > first:
            trainer.train(num_steps=until - first)
        with inspection.around(trainer):
            trainer.train(num_steps=len(inspection.steps))
            # Where gradients are accumulated, steps are on record when their window closes.
            epoch = _place_of(logged, last)[0]
            while comparison.seen < last and _epochs_finished(trainer) <= epoch:
                trainer.train(num_steps=1)
        reasons = [*_reasons(logged, program, trainer, first, last)]
    compared = comparison.compared
    differing = [each for each in sorted(compared) if compared[each].differences]
    shown = {*differing[:1], *({step} & {*differing})}
    unknown = [*comparison.unknown_of(step)]
    return ReplayReport(
        step=step,
        at=_place_of(logged, step),
        start=start,
        num_computed=last - first,
        same_bits=False if differing else (None if unknown else True),
        num_compared=sum(each.num_hashes for each in compared.values()),
        num_means=sum(each.num_means for each in compared.values()),
        differences=[each for n in sorted(shown) for each in compared[n].differences],
        reasons=reasons if differing else unknown,
        seconds=time.monotonic() - began,
    )


def _place_of(logged: LoggedRun, step: int) -> tuple[int, int]:
    """The epoch of a step, and the number of its global batch in it."""
    epoch, index = logged.steps[step].line["at"] or (0, 0)
    return epoch, index


def _epochs_finished(trainer: Any) -> int:
    finished: int = trainer._workers.call_rank_0(run_counts.with_args()).epochs_finished
    return finished


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


def _merged(logged: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of both, those of `given` first; where both have a mapping, of both mappings."""
    merged = {**logged, **given}
    for key in logged.keys() & given.keys():
        if isinstance(logged[key], dict) and isinstance(given[key], dict):
            merged[key] = _merged(logged[key], given[key])
    return merged


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


def _load_newest(
    trainer: Any, folder: str | os.PathLike[str], step: int, began: int
) -> tuple[str | None, int]:
    """Load the newest good checkpoint in front of a step; its path and its own step.

    Args:
        trainer: a new one.
        folder: of the checkpoints.
        step: the first that is to be computed again.
        began: the step after which the run began: 0, unless it went on from another run's.

    Raises:
        CheckpointError: none of them can be read, or there is none and the run has not begun with
            `setup`, or with weights of the user's own that it has trained since.
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
    if began > 0:
        raise CheckpointError(
            "no checkpoint is left in front of this step",
            where=os.path.abspath(folder),
            got=f"step {step} of a run that went on from step {began} of another one",
            fix=_BEHIND,
        )
    operator_cls = trainer._workers.spec.operator_cls
    is_instance = operator_cls._lockstep_given is not None
    if is_instance and operator_cls._lockstep_trains_copies:
        raise CheckpointError(
            "no checkpoint is left in front of this step, and the first weights are gone",
            where=os.path.abspath(folder),
            got=f"step {step} of a run that began with the weights of a model of your own",
            cause="the model that the operator was made from holds the trained weights",
            fix=f"{_BEHIND}; or run `lockstep replay`: the program that it imports makes the model",
        )
    return None, 0


def _reasons(
    logged: LoggedRun,
    program: Mapping[str, Any],
    trainer: Any,
    first: int,
    step: int,
) -> Iterator[str]:
    """Why bits may differ, as far as the log tells."""
    for changed, by in logged.changes:
        # What changed the state of a checkpoint's step is in the checkpoint.
        if first < changed < step or (changed == first == 0 and by != ON_LOAD):
            yield f"after step {changed} the program called {by}, which a replay does not"
    if first + 1 in logged.steps and logged.program_of(first + 1) is not program:
        yield f"another program computed step {first + 1}, maybe with another config"
    workers = trainer._workers
    machine = describe_machine(workers.start_reports[0].device, workers.spec.threads)
    for key, value in program["machine"].items():
        if machine.get(key) != value:
            yield f"{key} was {value}, and is {machine.get(key)}"
    if "hook" in program and workers.spec.initialization_hook is None:
        yield f"the run had an initialization_hook that is not called here: {program['hook']}"
    given = program["arguments"]
    if given["num_workers"] > 1 and not given["reproducible"]:
        yield "without reproducible=True N workers add gradients in another order: to rounding"
