# SPDX-License-Identifier: Apache-2.0
"""The errors that refuse a call of a trainer: no loader, no batch, no workers, concurrent calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.errors import (
    ConfigurationError,
    TrainerClosedError,
    WrongUseError,
)
from lockstep.operator import TrainingOperator
from lockstep.worker import error_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.worker import StartReport, WorkerSpec


def check_loader(started: Sequence[StartReport], operator: str, purpose: str) -> None:
    """Raise if a worker has no loader for `purpose`, or if all of them are empty.

    Checked in the driver and not by the workers: a failed step ends them, a missing loader should
    not.
    """
    for rank, worker in enumerate(started):
        if purpose not in worker.steps_per_epoch:
            raise ConfigurationError(
                f"{operator} registered no {purpose} loader",
                where=f"rank {rank}",
                fix=f"call self.register_data({purpose}_loader=...) inside setup",
            )
    if all(worker.steps_per_epoch[purpose] == 0 for worker in started):
        raise _empty_loader_error(operator, purpose)


def no_batch_error(
    operator_cls: type[TrainingOperator], purpose: str, started: Sequence[StartReport]
) -> ConfigurationError:
    """The error for a call that ended without a step."""
    operator = operator_cls.__name__
    method = TrainingOperator.train_epoch if purpose == "train" else TrainingOperator.validate
    if not operator_cls._lockstep_overrides(method) or not any(
        worker.steps_per_epoch[purpose] for worker in started
    ):
        return _empty_loader_error(operator, purpose)
    loop = method.__name__
    return ConfigurationError(
        f"{operator}.{loop} ended without having read a batch",
        got=f"a {purpose} loader with batches",
        cause="it does not iterate over its first argument, from where batches come",
        fix=f"def {loop}(self, iterator, info): for batch in iterator: ...",
    )


def _empty_loader_error(operator: str, purpose: str) -> ConfigurationError:
    return ConfigurationError(
        f"the {purpose} loader of {operator} has not one batch",
        cause="an empty dataset, or drop_last=True with fewer samples than a global batch",
        fix="drop_last=False, or a smaller batch size",
    )


def concurrent_call_error(method: str) -> WrongUseError:
    """The error for a call of `method` while another call runs."""
    return WrongUseError(
        f"{method} was called while another call of this trainer runs",
        cause="another thread, a signal handler, or the operator itself called it",
        fix="call it after the other has returned; from a callback or between calls of"
        " train(num_steps=...)",
    )


def no_local_operator_error() -> ConfigurationError:
    """The error where all workers live in processes of their own."""
    return ConfigurationError(
        "no operator lives in this process",
        fix="TorchTrainer(..., use_local=True), or trainer.apply_all_operators(fn)",
    )


def shut_down_error() -> TrainerClosedError:
    """The error for a call after `shutdown`."""
    return TrainerClosedError(
        "this trainer was shut down",
        fix="create a new TorchTrainer; load(path) goes on from a checkpoint",
    )


def workers_ended_error(reason: BaseException, spec: WorkerSpec) -> TrainerClosedError:
    """The error for a call after `reason` has ended the workers."""
    first_line = next(iter(error_text(reason).splitlines()), "")
    got = None
    if not spec.can_go_back and spec.obstacle is not None:
        argument, why = spec.obstacle
        got = f"{argument}: they cannot go back to the last committed step, for {why}"
    fix = "create a new TorchTrainer; load(path) goes on from a checkpoint"
    return TrainerClosedError(
        "this trainer's workers have ended",
        got=got,
        cause=f"{type(reason).__name__}: {first_line}",
        fix=reason.details["fix"] if isinstance(reason, TrainerClosedError) else fix,
    )
