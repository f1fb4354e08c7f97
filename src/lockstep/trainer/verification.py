# SPDX-License-Identifier: Apache-2.0
"""Makes the report of `verify` from the records of N workers and of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import NotAvailableError
from lockstep.parity import NO_NUMBERS, NOT_SYNCHRONISED, ParityReport, ParityRow, compare
from lockstep.trainer.argument_checks import require_count
from lockstep.trainer.loader_checks import check_loader
from lockstep.worker import verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.trainer.worker_calls import WorkerCalls
    from lockstep.worker import Trial, WorkerSpec

_TOLERANCES: Final = {"bf16": 3e-2, "fp16": 1e-2}
"""Tolerances by the precision of the computation, whatever the dtype of the parameters."""

_RANKS_ONLY: Final = "the same on all workers; not held against one process"
_RANKS_DIFFER: Final = "the workers' weights differ: something besides the gradient changes them"
_STEP_DIFFERS: Final = "the gradients agree, the weights after the step do not"


def refuse_unverifiable(spec: WorkerSpec) -> None:
    """Refuse a run whose global batches one process cannot get."""
    if spec.options.add_dist_sampler or spec.num_workers == 1:
        return
    raise NotAvailableError(
        "verify cannot tell what the global batch is",
        got="add_dist_sampler=False: every worker reads a loader of its own",
        fix="leave add_dist_sampler at True, or compare in a test of yours:"
        " lockstep.testing.assert_parity",
    )


def verify_steps(workers: WorkerCalls, num_steps: Any) -> ParityReport:
    """See `TorchTrainer.verify`."""
    require_count("num_steps", num_steps, expected="a positive number of steps")
    refuse_unverifiable(workers.spec)
    check_loader(workers, "train")
    return report(workers.call(verify.with_args(num_steps)), workers.spec)


def report(trials: Sequence[Trial], spec: WorkerSpec) -> ParityReport:
    """Make one row for each parameter, for the step and the worker with the largest difference."""
    ours, truth = trials[0].steps, trials[0].truth
    assert ours is not None, "rank 0 always sends its own"
    assert truth is not None
    by_rank = [trial.steps or ours for trial in trials]
    comparable = all(trial.is_comparable for trial in trials)
    tolerance = _TOLERANCES.get(spec.options.precision)
    rows: dict[str, ParityRow] = {}
    for number, true in enumerate(truth):
        found = [steps[number] for steps in by_rank]
        counts = {len(step.gradients) for step in (true, *found)}
        if len(counts) > 1:
            raise _different_steps_error(
                [len(step.gradients) for step in found], len(true.gradients)
            )
        for event, expected in enumerate(true.gradients):
            gradients = [step.gradients[event] for step in found]
            wanted = expected if comparable else gradients[0]
            for row in compare(wanted, gradients, tolerance=tolerance).rows:
                _keep_worse(rows, row)
        weights = [step.weights for step in found]
        for row in compare(weights[0], weights, tolerance=tolerance).rows:
            _note_weights(rows, row, _RANKS_DIFFER)
        held = true.linear if comparable else ()
        expected_weights = {name: true.weights[name] for name in true.weights if name in held}
        for row in compare(expected_weights, weights, tolerance=tolerance).rows:
            _note_weights(rows, row, _STEP_DIFFERS)
    shown = rows.values() if comparable else map(_mark_as_ranks_only, rows.values())
    notes = dict.fromkeys(note for trial in trials for note in trial.notes)
    # The replicas of one process are the workers that the user asked for.
    workers = max(len(trials), spec.options.replicas)
    inconclusive = next((trial.inconclusive for trial in trials if trial.inconclusive), "")
    without_numbers = [row.parameter for row in rows.values() if row.explanation == NO_NUMBERS]
    if without_numbers and not inconclusive:
        inconclusive = f"the gradient of `{without_numbers[0]}` is NaN or infinite in one process"
    return ParityReport(list(shown), workers, list(notes), inconclusive)


def _keep_worse(rows: dict[str, ParityRow], row: ParityRow) -> None:
    before = rows.get(row.parameter)
    if before is None or (before.ok, -before.relative_error) > (row.ok, -row.relative_error):
        rows[row.parameter] = row


def _note_weights(rows: dict[str, ParityRow], row: ParityRow, explanation: str) -> None:
    """Note wrong weights, unless a difference of the gradients explains them."""
    before = rows.get(row.parameter)
    if row.ok or (before is not None and before.explanation == NOT_SYNCHRONISED):
        return
    if before is None or before.ok or explanation == _RANKS_DIFFER:
        rows[row.parameter] = replace(row, explanation=explanation)


def _mark_as_ranks_only(row: ParityRow) -> ParityRow:
    return replace(row, explanation=_RANKS_ONLY) if row.ok else row


def _different_steps_error(by_rank: Sequence[int], alone: int) -> NotAvailableError:
    return NotAvailableError(
        "the workers and one process did not step equally often, so nothing can be compared",
        expected=f"{alone} optimizer steps, as in one process",
        got=", ".join(f"{count} on rank {rank}" for rank, count in enumerate(by_rank)),
        cause="the operator's loop steps by its rank or by the number of its samples; with fp16,"
        " one side met an infinity and left a step out",
        fix="step once for every batch of train_batch, on every rank",
    )
