# SPDX-License-Identifier: Apache-2.0
"""`RayDatasetFeed`: the driver's part of ``train(dataset=...)``, training on a Ray dataset."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lockstep.data import RayBatches
from lockstep.engine.dataset_streams import split_dataset
from lockstep.errors import ConfigurationError, WrongTypeError
from lockstep.keys import BATCH_SIZE
from lockstep.trainer.argument_checks import is_int
from lockstep.worker import Worker

if TYPE_CHECKING:
    from lockstep.engine import PoolStatus
    from lockstep.trainer.worker_calls import WorkerCalls
    from lockstep.worker import WorkerSpec


ON_RAY_DATASET: Final = "train(dataset=...)"
"""In the log of a run. Ray gives each row once: no step that follows can be computed again."""


class RayDatasetFeed:
    """Splits the dataset of a call among the workers, and remembers it for the next call."""

    def __init__(self) -> None:
        self._current: RayBatches | None = None
        # Streams are sent in pickles that Ray does not inspect: without a reference in the driver,
        # Ray takes the actor that feeds them for unused, and ends it.
        self._streams: list[Any] = []
        self._generation: int | None = None

    @property
    def has_dataset(self) -> bool:
        """Whether the workers train on a Ray dataset."""
        return self._current is not None

    def forget(self) -> None:
        """Drop the dataset, after the workers have dropped it or ended."""
        self._current, self._streams = None, []

    def set_dataset(self, dataset: Any, workers: WorkerCalls) -> None:
        """Have the workers train on `dataset`, or on their own loaders if it is None.

        Args:
            dataset: a ``ray.data.Dataset``, `RayBatches`, or None.
            workers: the workers.

        Raises:
            WrongTypeError: `dataset` is of another type.
            ConfigurationError: the batch size is not known, or reproducible=True.
            NotEnoughResourcesError: no CPU is left for reading the dataset.
        """
        if dataset is None:
            if self._current is not None:
                workers.call(Worker.feed.with_args(None, None))
            self.forget()
            return
        wanted = _check_dataset(dataset, workers.spec)
        # Every worker answers: one that was lost since the last call would never read its stream.
        workers.call(Worker.ping.with_args())
        # Again where workers were lost meanwhile: the others read the streams of the new split.
        while not self._is_fed(wanted, status := workers.open_engine().status()):
            self._feed(wanted, workers, status)

    def _is_fed(self, wanted: RayBatches, status: PoolStatus) -> bool:
        """Whether the workers read `wanted`: they drop a dataset when they form a new group."""
        is_known = self._current is not None and _is_same_dataset(wanted, self._current)
        return is_known and self._generation == status.generation

    def _feed(self, wanted: RayBatches, workers: WorkerCalls, status: PoolStatus) -> None:
        """Split `wanted` among as many workers as `status` has, and give each its stream."""
        spec = workers.spec
        # A lone worker lives in this process, and holds no CPU of the cluster. A lost one's CPU
        # stays reserved for its replacement.
        held = spec.num_workers * (spec.threads or 1) if spec.num_workers > 1 else 0
        self._streams = split_dataset(wanted.dataset, status.workers, held)
        self._current, self._generation = wanted, None  # until every worker has its stream
        # Each worker gets its stream, and does not need the dataset's plan.
        plan = replace(wanted, dataset=None)
        workers.call(Worker.feed.with_args(self._streams, plan))
        self._generation = status.generation


def _check_dataset(dataset: Any, spec: WorkerSpec) -> RayBatches:
    wanted = dataset if isinstance(dataset, RayBatches) else RayBatches(dataset)
    if not callable(getattr(wanted.dataset, "streaming_split", None)):
        raise WrongTypeError(
            "train(dataset=...) was given no Ray dataset",
            expected="a ray.data.Dataset, or lockstep.data.RayBatches around one",
            got=f"{type(wanted.dataset).__name__}: {wanted.dataset!r:.60}",
            fix="register a loader in setup: self.register_data(train_loader=...)",
        )
    if wanted.batch_size is None:
        wanted = replace(wanted, batch_size=spec.config.get(BATCH_SIZE))
    size = wanted.batch_size
    if not is_int(size) or size < spec.num_shards:
        raise ConfigurationError(
            "how many rows make a global batch is not known, or they are too few",
            expected=f"an int, {spec.num_shards} or more: each shard gets a part",
            got=f"batch size {size!r}",
            fix="TorchTrainer(..., config={BATCH_SIZE: 64}), or"
            " train(dataset=RayBatches(dataset, batch_size=64))",
        )
    if spec.options.reproducible:
        raise ConfigurationError(
            "reproducible=True cannot hold for a Ray dataset",
            cause="Ray decides while it runs which worker gets which rows",
            fix="leave reproducible out, or register a loader in setup",
        )
    return wanted


def _is_same_dataset(one: RayBatches, other: RayBatches) -> bool:
    # Datasets are compared by identity, for they define no equality; the other fields by value.
    plain = replace(one, dataset=None) == replace(other, dataset=None)
    return plain and one.dataset is other.dataset
