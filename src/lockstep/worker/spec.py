# SPDX-License-Identifier: Apache-2.0
"""`WorkerSpec`: the arguments of a trainer that every worker gets before it starts."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lockstep.data import split_batch_size
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.keys import BATCH_SIZE
from lockstep.operator import Options
from lockstep.serialization import dumps, dumps_or_refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lockstep.operator import TrainingOperator


@dataclass(frozen=True)
class WorkerSpec:
    """The trainer's arguments as far as a worker needs them; the same for every rank.

    Attributes:
        log_every: steps for each row of metrics; 0 without rows.
        records_steps: rows hold a `StepRecord`; only with `log_every` 1.
        memory_checkpoint_every: the trainer's argument of that name.

    Raises:
        ConfigurationError: workers read loaders of their own, and have several shards.
    """

    operator_cls: type[TrainingOperator]
    config: Mapping[str, Any]
    num_workers: int
    num_shards: int
    seed: int
    initialization_hook: Callable[[], Any] | None = None
    threads: int | None = None
    use_gpu: bool = False
    options: Options = field(default_factory=Options)
    checkpoint_every: int | None = None
    audit: str = "off"
    log_every: int = 0
    records_steps: bool = False
    memory_checkpoint_every: int | str | None = "auto"

    def __post_init__(self) -> None:
        workers = self.num_workers * self.options.replicas
        if self.options.add_dist_sampler or self.num_shards == workers:
            return
        raise ConfigurationError(
            "with add_dist_sampler=False there are as many workers as shards",
            expected=f"num_workers={self.num_shards}",
            got=f"num_workers={workers}, num_shards={self.num_shards}",
            cause="each worker reads one batch of its own loader in a step, and only that loader"
            " knows which samples the worker's part holds: with fewer workers a step would have"
            " fewer samples, and a resumed run would skip others than it has trained on",
            fix=f"num_workers={self.num_shards}, and leave num_shards out; or leave"
            " add_dist_sampler at True; for a replay: `lockstep replay --workers"
            f" {self.num_shards}`, trainer.replay(step, num_workers={self.num_shards})",
        )

    @property
    def obstacle(self) -> tuple[str, str] | None:
        """The argument that keeps several workers from forming their group anew, and the reason."""
        options = self.options
        if not options.wrap_ddp:
            return "wrap_ddp=False", "a wrapper of your own keeps the broken group"
        if not options.add_dist_sampler:
            return "add_dist_sampler=False", "only each worker itself knows its part of the data"
        if options.sync == "fsdp" and self.memory_checkpoint_every is None:
            return "memory_checkpoint_every=None", "each worker alone has a part of the state"
        if options.sync == "data_parallel":
            return "sync='data_parallel'", "its replicas live in one process, and end with it"
        return None

    @property
    def keeps_memory_checkpoints(self) -> bool:
        """Whether ranks keep copies of each other's part of the state, to survive a death."""
        return self.saves_parts and self.obstacle is None

    @property
    def saves_parts(self) -> bool:
        """Whether each rank has a part of the state, and writes that into a checkpoint."""
        return self.num_workers > 1 and self.options.sync == "fsdp"

    def to_bytes(self) -> bytes:
        """The spec as bytes.

        Raises:
            NotPicklableError: names the argument that cannot be pickled, and the key of `config`.
        """
        with suppress(Exception):
            return dumps(self)
        for key, value in self.config.items():
            dumps_or_refuse(value, f"config[{key!r}]")
        dumps_or_refuse(self.initialization_hook, "initialization_hook")
        dumps_or_refuse(self.operator_cls, f"the operator class {self.operator_cls.__name__}")
        return dumps_or_refuse(self, "the trainer's arguments")

    @property
    def can_go_back(self) -> bool:
        """Whether all workers can go back to the last committed step while all of them live."""
        return self.num_workers == 1 or self.obstacle is None

    def with_shards_of(self, state: Mapping[str, Any], where: str | None = None) -> WorkerSpec:
        """This spec with the number of shards that `state` cuts global batches into.

        Args:
            where: the place of the state, for the error.

        Raises:
            CheckpointError: there are more workers than shards.
            ConfigurationError: there are fewer, and workers read loaders of their own.
        """
        shards: int = state.get("num_shards", self.num_shards)
        if shards < self.num_workers:
            raise CheckpointError(
                "the state cuts every global batch into fewer shards than there are workers",
                where=where,
                expected=f"at most {shards} workers",
                got=f"num_workers={self.num_workers}",
                fix=f"TorchTrainer(..., num_workers={shards}); a run that is to grow is begun with"
                " num_shards of the most workers that it will have",
            )
        return replace(self, num_shards=shards)


def config_for(spec: WorkerSpec, shard: int) -> Any:
    """The config for `setup`, with the share of a worker's first `shard` as its batch size.

    Its dicts, nested ones too, are copies: another `setup` of the run, as `verify` calls it, finds
    what this one may take out of them. A loader that is read as it is gets the share of all
    replicas of its process, which one batch of it is cut for.
    """
    own = _with_own_dicts(spec.config)
    if own.get(BATCH_SIZE) is None:
        return own
    joined = 1 if spec.options.add_dist_sampler else spec.options.replicas
    shards, place = spec.num_shards // joined, shard // joined
    return {**own, BATCH_SIZE: split_batch_size(own[BATCH_SIZE], shards, place)}


def _with_own_dicts(value: Any) -> Any:
    if type(value) is dict:
        return {key: _with_own_dicts(each) for key, each in value.items()}
    return copy.copy(value) if isinstance(value, dict) else value
