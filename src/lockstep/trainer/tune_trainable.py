# SPDX-License-Identifier: Apache-2.0
"""`as_trainable`: the front door of `TorchTrainer` to Ray Tune."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def as_trainable(
    trainer_cls: type[Any],
    /,
    *,
    override_tune_step: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None,
    **arguments: Any,
) -> Any:
    """A class for ``tune.Tuner`` and ``tune.run``: each trial trains with its own workers.

    ::

        trainable = TorchTrainer.as_trainable(training_operator_cls=Digits, num_workers=2)
        tune.Tuner(trainable, param_space={"lr": tune.loguniform(1e-3, 1)}).fit()

    What Tune chooses is merged over `config`; a ``num_workers`` in it is the trial's own.

    Args:
        override_tune_step: one iteration of a trial: ``fn(trainer, {"iteration": n})``, which
            returns a dict of results. By default one `train` and, if the operator registered
            a validation loader, one `validate`.
        arguments: those of `TorchTrainer`, without `checkpoint_dir`, `checkpoint_every` and
            `resume`: a trial's state is kept by Tune.

    Raises:
        ConfigurationError: `override_tune_step` takes something else than two arguments, or an
            argument would give trials a state that is not their own.
        NotAvailableError: Ray Tune, or what it needs, is not installed.
    """
    from lockstep.integrations import tune

    return tune.as_trainable(trainer_cls, override_tune_step=override_tune_step, **arguments)
