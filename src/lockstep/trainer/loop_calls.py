# SPDX-License-Identifier: Apache-2.0
"""Runs `train` or `validate` on all workers, and reduces their reports to the call's result."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.errors import CheckpointWriteError, WrongTypeError
from lockstep.trainer.argument_checks import require_count
from lockstep.trainer.loader_checks import no_batch_error
from lockstep.trainer.profiler_traces import Profile, trace_workers
from lockstep.trainer.progress_bar import ProgressBar, wants_bar
from lockstep.trainer.progress_listeners import ProgressListeners
from lockstep.trainer.report_merge import (
    merge_reports,
    refuse_unused_metrics,
    warn_of_varying_metrics,
)
from lockstep.worker import LoopRequest, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.trainer.callback_list import CallbackList
    from lockstep.trainer.step_metrics import StepMetrics
    from lockstep.trainer.worker_calls import WorkerCalls
    from lockstep.worker import Report


def loop_request(purpose: str, num_steps: Any, profile: Profile, info: Any) -> LoopRequest:
    """Check the arguments of `train` or `validate`, and make the request for the workers."""
    expected = "a positive number of global batches, or None"
    require_count("num_steps", num_steps, optional=True, expected=expected)
    if not isinstance(info, dict | None):
        raise WrongTypeError("info is not a dict", got=f"{type(info).__name__}: {info!r:.60}")
    return LoopRequest(purpose, num_steps, bool(profile), dict(info or {}))


def run_loop(
    workers: WorkerCalls,
    callbacks: CallbackList,
    steps: StepMetrics,
    request: LoopRequest,
    profile: Profile,
    retries: int = 3,
    on_answers: Callable[[], None] | None = None,
) -> list[Report]:
    """Let all workers run a loop, and report its progress to callbacks and a progress bar.

    Args:
        profile: see `TorchTrainer.train`.
        retries: see `Engine.call`.
        on_answers: called when all workers have answered, before anything else that may raise.

    Returns:
        The reports of all workers, lost workers included.

    Raises:
        ConfigurationError: no worker has read a batch.
    """
    purpose = request.purpose
    method = Worker.train if purpose == "train" else Worker.validate
    bar = ProgressBar(purpose) if wants_bar(workers.spec.options.use_tqdm) else None
    with trace_workers(workers, profile, method.contract.name), bar or nullcontext():
        request = replace(request, rows_known=steps.written)
        shadow = workers.shadow if workers.spec.options.shadow_every else None
        listeners = ProgressListeners(callbacks, purpose, steps, bar, shadow)
        listener = listeners if listeners.has_listeners else None
        reports = workers.call(method.with_args(request), listener=listener, retries=retries)
        if on_answers is not None:
            on_answers()
        workers.shadow.finish(reports)
        listeners.finish(reports)
    if not any(report.steps for report in reports):
        raise no_batch_error(workers, purpose)
    return reports


def reduce_reports(
    reports: Sequence[Report], tell: Callable[[dict[str, Any]], None], reduce_results: bool
) -> Any:
    """Make the result of `train` or `validate` from the workers' reports.

    Args:
        tell: called with the merged result, in either case.
        reduce_results: False for the results of each living worker, by rank.

    Raises:
        CheckpointWriteError: a callback could not save; it holds the result.
    """
    refuse_unused_metrics(reports)
    for each in [reports] if reduce_results else [[report] for report in reports]:
        warn_of_varying_metrics(each)
    result: Any = merge_reports(reports)
    told, living = result, [report for report in reports if not report.is_of_a_lost_worker]
    if not reduce_results:
        result = [merge_reports([report]) for report in living]
    try:
        tell(told)
    except CheckpointWriteError as error:  # of a callback that saves, as `KeepBest` does
        error.result = result
        raise
    return result
