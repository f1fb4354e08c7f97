# SPDX-License-Identifier: Apache-2.0
"""Refuses a loop whose workers have no loader, and one that has read no batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.errors import ConfigurationError
from lockstep.operator import TrainingOperator
from lockstep.worker import steps_per_epoch

if TYPE_CHECKING:
    from lockstep.trainer.worker_calls import WorkerCalls


def check_loader(workers: WorkerCalls, purpose: str) -> None:
    """Raise if a worker has no loader for `purpose`.

    Checked in the driver and not by the workers: a failed step ends them, a missing loader should
    not. A loader without a batch may have some by now: a dataset may grow after `setup`.
    """
    for rank, worker in enumerate(workers.start_reports):
        if purpose not in worker.steps_per_epoch:
            raise ConfigurationError(
                f"{workers.spec.operator_cls.__name__} registered no {purpose} loader",
                where=f"rank {rank}",
                fix=f"call self.register_data({purpose}_loader=...) inside setup",
            )


def no_batch_error(workers: WorkerCalls, purpose: str) -> ConfigurationError:
    """The error for a call that ended without a step."""
    operator_cls = workers.spec.operator_cls
    operator = operator_cls.__name__
    method = TrainingOperator.train_epoch if purpose == "train" else TrainingOperator.validate
    if not operator_cls._lockstep_overrides(method) or not any(
        workers.call(steps_per_epoch.with_args(purpose))
    ):
        return ConfigurationError(
            f"the {purpose} loader of {operator} has not one batch",
            cause="an empty dataset, or drop_last=True with fewer samples than a global batch",
            fix="drop_last=False, or a smaller batch size",
        )
    loop = method.__name__
    return ConfigurationError(
        f"{operator}.{loop} ended without having read a batch",
        got=f"a {purpose} loader with batches",
        cause="it does not iterate over its first argument, from where batches come",
        fix=f"def {loop}(self, iterator, info): for batch in iterator: ...",
    )
