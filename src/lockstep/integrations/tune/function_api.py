# SPDX-License-Identifier: Apache-2.0
"""Helpers for Tune's Function API: report results, restore a trial, reserve resources."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from lockstep.engine.placement_group import bundle_for, warn_of_missing_resources
from lockstep.errors import ConfigurationError
from lockstep.integrations.optional_packages import import_optional
from lockstep.integrations.tune import trial_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.trainer import TorchTrainer


def resources(
    num_workers: int,
    *,
    spare_workers: int = 0,
    num_cpus_per_worker: float = 1,
    num_gpus_per_worker: float = 0,
    resources_per_worker: Mapping[str, float] | None = None,
) -> Any:
    """A trial's resources: one bundle for each worker and spare; the function itself needs none.

    ::

        tune.Tuner(tune.with_resources(function, resources(num_workers=2)), ...)

    Raises:
        NotAvailableError: Ray Tune is not installed.
    """
    tune = import_optional("ray.tune", extra="tune", by="lockstep.integrations.tune")
    bundle = bundle_for(num_cpus_per_worker, num_gpus_per_worker, resources_per_worker)
    num_processes = num_workers + spare_workers
    warn_of_missing_resources(bundle, num_processes, "a trial")
    return tune.PlacementGroupFactory([{}, *([bundle] * num_processes)], strategy="PACK")


def report(trainer: TorchTrainer, metrics: Mapping[str, Any], *, checkpoint: bool = True) -> None:
    """Report a result of this trial, and the trainer's state, to Tune.

    ::

        def trial(config):
            arguments = {"training_operator_cls": Digits, "num_workers": 2, "config": config}
            with TorchTrainer(**arguments) as trainer:
                restore(trainer)
                while trainer.status()["epochs_finished"] < 10:
                    trainer.train()
                    report(trainer, trainer.validate())

    Args:
        metrics: the metrics by which Tune's schedulers and searchers decide.
        checkpoint: whether to report the state. Without it a trial that was paused begins anew.
    """
    tune = import_optional("ray.tune", extra="tune", by="lockstep.integrations.tune.report")
    if not checkpoint:
        tune.report(dict(metrics))
        return
    with tempfile.TemporaryDirectory() as folder:
        trial_checkpoint.write(trainer, folder)
        tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(folder))


def restore(trainer: TorchTrainer) -> bool:
    """Load the checkpoint that Tune gives this trial: its own, or that of a better trial.

    Call it before the first `train`; a trial that begins may leave it out.

    Returns:
        Whether there was a checkpoint.

    Raises:
        ConfigurationError: the trainer has trained, or gone on from a state of its own.
    """
    tune = import_optional("ray.tune", extra="tune", by="lockstep.integrations.tune.restore")
    if step := trainer.status()["step"]:
        raise ConfigurationError(
            "restore comes too late: the trainer has a state that Tune does not know",
            expected="a trainer that has not trained, and was made without resume",
            got=f"one behind {step} global batches",
            cause="in a trial without a checkpoint its rates would stay, whatever the config says",
            fix="leave resume=... and trainer.load(...) out: the trial's state is kept by Tune; to"
            " start from trained weights, load them in setup",
        )
    found = tune.get_checkpoint()
    if found is None:
        return False
    with found.as_directory() as folder:
        trial_checkpoint.read(trainer, folder)
    return True
