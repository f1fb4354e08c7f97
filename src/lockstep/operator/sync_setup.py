# SPDX-License-Identifier: Apache-2.0
"""The way to synchronise that `TorchTrainer(sync=...)` names, put to work among the peers."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from lockstep._torch_compat import COMPILER
from lockstep.errors import ConfigurationError
from lockstep.import_without_gc import gc_paused
from lockstep.operator.optimizer_comparison import agree_on_steps
from lockstep.operator.rank_context import ONE_PROCESS, ONE_PROCESS_BY_SHARD, shard_order
from lockstep.sync import (
    GradientSync,
    ParameterServerSync,
    ReplicatedModel,
    SingleProcess,
    replica_devices,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.operator.rank_context import RankContext
    from lockstep.operator.training_parts import TrainingParts, Wanted
    from lockstep.sync import Synchroniser


def tie(registered: TrainingParts, context: RankContext) -> None:
    """Attach `registered` to the peers, and compare what the ranks registered.

    Collective:
        Every rank; see `attach`.
    """
    if not any(True for _ in registered.parameters()):
        return
    registered.sync = attach(registered, context, registered.wanted)
    if context.group.size == 1:
        return
    registered.attached = tuple(registered.parameters())
    try:
        agree_on_steps(context.group, registered)
    except BaseException:
        # Nobody gets hold of it, and its hooks would keep it on the parameters.
        registered.sync.detach()
        raise


def rejoin(registered: TrainingParts, context: RankContext, committed: int) -> None:
    """Attach to the peers of another generation, which hold the same values already.

    Args:
        committed: steps of the run that have happened.

    Collective:
        Every rank; see `attach`.
    """
    if not context.options.wrap_ddp:
        return
    if registered.sync is not None and registered.may_join:
        registered.sync.join(context.group)
        registered.attached = tuple(registered.parameters())
        agree_on_steps(context.group, registered)
        return
    registered.wanted = replace(registered.wanted, goes_on_at=committed)
    tie(registered, context)


def attach(registered: TrainingParts, context: RankContext, wanted: Wanted) -> Synchroniser:
    """Tie `registered` to its peers in the way that ``context.options.sync`` names.

    A way may put other objects (a wrapper, a remapped optimizer) into `registered`: they are
    what `register` returns.

    Collective:
        Every rank: compares structure, broadcasts rank 0's weights.
    """
    sync = context.options.sync
    if wanted.ddp_args and sync not in ("ddp", ONE_PROCESS, ONE_PROCESS_BY_SHARD):
        raise ConfigurationError(
            "ddp_args were given, but the gradients are not synchronised by torch's DDP",
            got=f"ddp_args={dict(wanted.ddp_args)!r}",
            fix='leave them out, or write TorchTrainer(..., sync="ddp")',
        )
    return _WAYS[sync](registered, context, wanted)


def _replicate(registered: TrainingParts, context: RankContext, wanted: Wanted) -> Synchroniser:
    return GradientSync(
        registered.modules(),
        context.group,
        bucket_cap_mb=context.options.bucket_cap_mb,
        broadcast=wanted.goes_on_at is None,
        buffers=wanted.buffers,
        averages=wanted.averages,
        order=shard_order(context),
    )


def _alone(registered: TrainingParts, context: RankContext, wanted: Wanted) -> Synchroniser:
    return SingleProcess(registered.modules(), averages=wanted.averages)


def _ddp(registered: TrainingParts, context: RankContext, wanted: Wanted) -> Synchroniser:
    # Imported only by who asks for it: it brings torch's DDP, which brings the compiler.
    with gc_paused():
        import_module(COMPILER)
    from lockstep.sync.ddp import DDPSync

    sync = DDPSync(
        registered.modules(),
        context.group,
        ddp_args=wanted.ddp_args,
        bucket_cap_mb=context.options.bucket_cap_mb,
        buffers=wanted.buffers,
        averages=wanted.averages,
    )
    registered.replace_modules(sync.models)
    return sync


def _fsdp(registered: TrainingParts, context: RankContext, wanted: Wanted) -> Synchroniser:
    if context.group.is_alone:
        return _replicate(registered, context, wanted)  # its rows are all rows
    # Imported only by who asks for it: it brings torch's DTensor.
    from lockstep.sync.fsdp import FSDPSync

    return FSDPSync(
        registered.modules(),
        context.group,
        registered.optimizers,
        bucket_cap_mb=context.options.bucket_cap_mb,
        buffers=wanted.buffers,
        averages=wanted.averages,
    )


def _parameter_server(
    registered: TrainingParts, context: RankContext, wanted: Wanted
) -> Synchroniser:
    return ParameterServerSync(
        registered.modules(),
        registered.optimizers,
        context.group,
        context.owner,
        goes_on_at=wanted.goes_on_at,
        bucket_cap_mb=context.options.bucket_cap_mb,
        broadcast=wanted.goes_on_at is None,
        buffers=wanted.buffers,
        averages=wanted.averages,
    )


def _data_parallel(registered: TrainingParts, context: RankContext, wanted: Wanted) -> Synchroniser:
    devices = replica_devices(context.device, context.options.replicas)
    replicated = [ReplicatedModel(model, devices) for model in registered.models]
    # Weights and windows are those of one worker, which has the whole batch. Attached last:
    # of models that were refused nobody would let go.
    sync = _replicate(registered, context, wanted)
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
