# SPDX-License-Identifier: Apache-2.0
"""What a trainer does besides training: predictions, and the doors to other people's tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lockstep.trainer import prediction
from lockstep.trainer.durable import SavesMeanwhile

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.trainer.driver import TorchTrainer


class BesideTraining(SavesMeanwhile):
    """The part of `TorchTrainer` that trains nothing."""

    _has_told_failure = False

    def _tell_failure(self, error: BaseException) -> None:
        if not self._has_told_failure:
            self._has_told_failure = True
            for callback in self._callbacks:
                callback.on_failure(cast("TorchTrainer", self), error)

    @property
    def should_stop(self) -> bool:
        """Whether a callback has a reason to train no further; see `Callback.stop_reason`."""
        return any(callback.stop_reason is not None for callback in self._callbacks)

    @classmethod
    def as_trainable(
        cls,
        *,
        override_tune_step: Callable[[TorchTrainer, dict[str, Any]], dict[str, Any]] | None = None,
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
            arguments: those of `TorchTrainer`.

        Raises:
            ConfigurationError: `override_tune_step` takes something else than two arguments.
            NotAvailableError: Ray Tune, or what it needs, is not installed.
        """
        from lockstep.integrations import tune

        return tune.as_trainable(
            cast("type[TorchTrainer]", cls), override_tune_step=override_tune_step, **arguments
        )

    def _has_loader(self, purpose: str) -> bool:
        return all(purpose in worker["loaders"] for worker in self._engine.started)

    def predict(self, loader: Any) -> list[Any]:
        """The model's outputs for every sample of `loader`, each once; see `predict_batch`.

        ::

            outputs = torch.stack(trainer.predict(DataLoader(dataset, batch_size=64)))

        Args:
            loader: a loader as `register_data` takes it; it is sent to the workers. An incomplete
                last batch is read also with ``drop_last=True``.

        Returns:
            One item per sample, tensors on the CPU. Item i is that of ``dataset[i]``, also if the
            loader shuffles; where its sampler leaves samples out or repeats some, and for streams,
            items come in the loader's order.

        Raises:
            NotShardableError: the loader cannot be shared out so that each sample is seen once.
            ConfigurationError: `predict_batch` returned something without one row per sample.
            Whatever the model raises; the run is as it was.
        """
        return prediction.in_order(self._call("predict", loader))
