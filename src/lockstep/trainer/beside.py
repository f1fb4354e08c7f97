# SPDX-License-Identifier: Apache-2.0
"""What a trainer does besides training: predictions, and the doors to other people's tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lockstep.trainer import prediction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.trainer.callbacks import Callback
    from lockstep.trainer.driver import TorchTrainer


class BesideTraining:
    """The part of `TorchTrainer` that trains nothing."""

    _callbacks: Sequence[Callback]
    _has_told_failure = False

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def _tell_failure(self, error: BaseException) -> None:
        if not self._has_told_failure:
            self._has_told_failure = True
            for callback in self._callbacks:
                callback.on_failure(cast("TorchTrainer", self), error)

    @property
    def should_stop(self) -> bool:
        """Whether a callback has a reason to train no further; see `Callback.stop_reason`."""
        return any(callback.stop_reason is not None for callback in self._callbacks)

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
