# SPDX-License-Identifier: Apache-2.0
"""The errors that refuse a call of a trainer: no workers, no scheduler, concurrent calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.error_texts import NEW_TRAINER, first_line
from lockstep.errors import ConfigurationError, TrainerClosedError, WrongUseError

if TYPE_CHECKING:
    from lockstep.worker import WorkerSpec


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


def no_scheduler_error() -> ConfigurationError:
    """The error for `update_scheduler` of a run without schedulers."""
    return ConfigurationError(
        "update_scheduler was called, but the operator registered no scheduler",
        fix="self.register(..., schedulers=...) in setup",
    )


def shut_down_error() -> TrainerClosedError:
    """The error for a call after `shutdown`."""
    return TrainerClosedError(
        "this trainer was shut down",
        fix=NEW_TRAINER,
    )


def workers_ended_error(reason: BaseException, spec: WorkerSpec) -> TrainerClosedError:
    """The error for a call after `reason` has ended the workers."""
    got = None
    if not spec.can_go_back and spec.obstacle is not None:
        argument, why = spec.obstacle
        got = f"{argument}: they cannot go back to the last committed step, for {why}"
    return TrainerClosedError(
        "this trainer's workers have ended",
        got=got,
        cause=f"{type(reason).__name__}: {first_line(reason)}",
        fix=reason.details["fix"] if isinstance(reason, TrainerClosedError) else NEW_TRAINER,
    )
