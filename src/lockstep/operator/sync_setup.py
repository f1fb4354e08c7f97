# SPDX-License-Identifier: Apache-2.0
"""The way to synchronise that `TorchTrainer(sync=...)` names, put to work among the peers."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from lockstep.errors import ConfigurationError
from lockstep.imports import no_collections
from lockstep.operator.optimizer_checks import agree_on_steps
from lockstep.operator.rank_context import ONE_PROCESS, ONE_PROCESS_BY_SHARD, shard_order
from lockstep.sync import (
    GradientSync,
    ParameterServer,
    ReplicatedModel,
    SingleProcess,
    replica_devices,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.operator.rank_context import RankContext
    from lockstep.operator.training_parts import TrainingParts, Wanted
    from lockstep.sync import Synchroniser


def tie(registered: TrainingParts, setting: RankContext) -> None:
    """Attach `registered` to the peers, and compare what the ranks registered.

    Collective:
        Every rank; see `attach`.
    """
    if not any(True for _ in registered.parameters()):
        return
    registered.sync = attach(registered, setting, registered.wanted)
    if setting.group.size == 1:
        return
    registered.attached = tuple(registered.parameters())
    try:
        agree_on_steps(setting.group, registered)
    except BaseException:
        # Nobody gets hold of it, and its hooks would keep it on the parameters.
        registered.sync.detach()
        raise


def rejoin(registered: TrainingParts, setting: RankContext, committed: int) -> None:
    """Attach to the peers of another generation, which hold the same values already.

    Args:
        committed: steps of the run that have happened.

    Collective:
        Every rank; see `attach`.
    """
    if not setting.options.wrap_ddp:
        return
    if registered.sync is not None and registered.may_join:
        registered.sync.join(setting.group)
        registered.attached = tuple(registered.parameters())
        agree_on_steps(setting.group, registered)
        return
    registered.wanted = replace(registered.wanted, goes_on_at=committed)
    tie(registered, setting)


def attach(registered: TrainingParts, setting: RankContext, wanted: Wanted) -> Synchroniser:
    """Tie `registered` to its peers in the way that ``setting.options.sync`` names.

    A way may put other objects (a wrapper, a remapped optimizer) into `registered`: they are
    what `register` returns.

    Collective:
        Every rank: compares structure, broadcasts rank 0's weights.
    """
    sync = setting.options.sync
    if wanted.ddp_args and sync not in ("ddp", ONE_PROCESS, ONE_PROCESS_BY_SHARD):
        raise ConfigurationError(
            "ddp_args were given, but the gradients are not synchronised by torch's DDP",
            got=f"ddp_args={dict(wanted.ddp_args)!r}",
            fix='leave them out, or write TorchTrainer(..., sync="ddp")',
        )
    return _WAYS[sync](registered, setting, wanted)


def _replicate(registered: TrainingParts, setting: RankContext, wanted: Wanted) -> Synchroniser:
    return GradientSync(
        registered.modules(),
        setting.group,
        bucket_cap_mb=setting.options.bucket_cap_mb,
        broadcast=wanted.goes_on_at is None,
        buffers=wanted.buffers,
        averages=wanted.averages,
        order=shard_order(setting),
    )


def _alone(registered: TrainingParts, setting: RankContext, wanted: Wanted) -> Synchroniser:
    return SingleProcess(registered.modules(), averages=wanted.averages)


def _ddp(registered: TrainingParts, setting: RankContext, wanted: Wanted) -> Synchroniser:
    # Imported only by who asks for it: it brings torch's DDP, which brings the compiler.
    with no_collections():
        import_module("torch._dynamo")
    from lockstep.sync.ddp_sync import DDPSync

    sync = DDPSync(
        registered.modules(),
        setting.group,
        ddp_args=wanted.ddp_args,
        bucket_cap_mb=setting.options.bucket_cap_mb,
        buffers=wanted.buffers,
        averages=wanted.averages,
    )
    registered.replace_modules(sync.models)
    return sync


def _fsdp(registered: TrainingParts, setting: RankContext, wanted: Wanted) -> Synchroniser:
    if setting.group.is_alone:
        return _replicate(registered, setting, wanted)  # its rows are all rows
    # Imported only by who asks for it: it brings torch's DTensor.
    from lockstep.sync.fsdp import FSDPSync

    return FSDPSync(
        registered.modules(),
        setting.group,
        registered.optimizers,
        bucket_cap_mb=setting.options.bucket_cap_mb,
        buffers=wanted.buffers,
        averages=wanted.averages,
    )


def _parameter_server(
    registered: TrainingParts, setting: RankContext, wanted: Wanted
) -> Synchroniser:
    return ParameterServer(
        registered.modules(),
        registered.optimizers,
        setting.group,
        setting.owner,
        goes_on_at=wanted.goes_on_at,
        bucket_cap_mb=setting.options.bucket_cap_mb,
        broadcast=wanted.goes_on_at is None,
        buffers=wanted.buffers,
        averages=wanted.averages,
    )


def _data_parallel(registered: TrainingParts, setting: RankContext, wanted: Wanted) -> Synchroniser:
    devices = replica_devices(setting.device, setting.options.replicas)
    replicated = [ReplicatedModel(model, devices) for model in registered.models]
    # Weights and windows are those of one worker, which has the whole batch. Attached last:
    # of models that were refused nobody would let go.
    sync = _replicate(registered, setting, wanted)
    registered.replace_modules(replicated)
    return sync


_WAYS: dict[str, Callable[[TrainingParts, RankContext, Wanted], Synchroniser]] = {
    "replicate": _replicate,
    ONE_PROCESS: _alone,
    ONE_PROCESS_BY_SHARD: _alone,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "parameter_server": _parameter_server,
    "data_parallel": _data_parallel,
}
