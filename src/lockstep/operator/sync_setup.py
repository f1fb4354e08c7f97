# SPDX-License-Identifier: Apache-2.0
"""Attaches to a model the synchronisation of gradients that `TorchTrainer(sync=...)` names."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from lockstep._torch_compat import COMPILER
from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.operator.model_copies import copy_models, places_of_modules
from lockstep.operator.optimizer_comparison import compare_optimizers, describe_states
from lockstep.operator.rank_context import ONE_PROCESS, ONE_PROCESS_BY_SHARD, shard_order
from lockstep.paused_gc import pause_gc
from lockstep.sync import (
    DataParallelModel,
    GradientSync,
    ParameterServerSync,
    SingleProcess,
    agree_on_shapes,
    expect_alone,
    replica_devices,
    tell_apart,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.operator.rank_context import Options, RankContext
    from lockstep.operator.training_parts import SyncOptions, TrainingParts
    from lockstep.sync import Synchroniser


def attach(registered: TrainingParts, context: RankContext) -> None:
    """Synchronise the gradients of `registered`, and compare the ranks' optimizers.

    The synchronisation may put other objects (a wrapper, a remapped optimizer) into `registered`:
    they are what `register` returns.

    Collective:
        Every rank: compares structure, broadcasts rank 0's weights, compares optimizers.
    """
    if not any(True for _ in registered.parameters()):
        return
    # Before they are cut into shards. A parameter server takes those of rank 0.
    is_served = context.options.sync == "parameter_server"
    states = [] if is_served or context.group.is_alone else describe_states(registered)
    registered.sync = _synchroniser(registered, context)
    if context.group.size > 1:
        _compare(registered, context, states)


def _compare(registered: TrainingParts, context: RankContext, states: Sequence[str] = ()) -> None:
    assert registered.sync is not None, "attached"
    registered.attached = tuple(registered.parameters())
    try:
        compare_optimizers(context.group, registered, states)
        tell_apart(registered.optimizers)
    except BaseException:
        # `register` fails and returns nothing; the hooks would stay on the user's parameters.
        registered.sync.detach()
        raise


def rejoin(
    registered: TrainingParts,
    context: RankContext,
    committed: int,
    load: Callable[[], None] | None = None,
) -> None:
    """Attach to the ranks of a new group, which hold the same values already, maybe in buffers of
    different shapes.

    Args:
        committed: steps of the run that have happened.
        load: loads values into models and optimizers that have just been cut into other shards.

    Collective:
        Every rank; see `attach`.
    """
    if not context.options.wrap_ddp:
        return
    agree_on_shapes(context.group, registered.plain_modules())
    if registered.sync is not None and registered.can_join:
        registered.sync.join_group(context.group)
    elif any(True for _ in registered.parameters()):
        registered.sync_options = replace(registered.sync_options, resume_step=committed)
        registered.sync = _synchroniser(registered, context)
    if load is not None:
        load()
    if registered.sync is not None:
        _compare(registered, context)


def is_in_units(registered: TrainingParts, context: RankContext) -> bool:
    """Whether `attach` cuts the models into shards, unit by unit."""
    options = context.options
    return (
        options.sync == "fsdp"
        and options.wrap_ddp
        and registered.sync_options.shard != "whole"
        and not context.group.is_alone
    )


def check_shard_size(sync_options: SyncOptions, context: RankContext) -> None:
    """Refuse a number of ranks over which a copy of the models cannot be sharded.

    Under another sync, and with one rank, it has no effect, as ``shard`` has none.

    Raises:
        ConfigurationError: it cannot.
    """
    size, num_workers = sync_options.dp_shard_size, context.world_size
    if size is None or context.options.sync != "fsdp" or context.group.is_alone:
        return
    # A spare does not know yet how many they will be; a group that lost a rank, in which `verify`
    # runs `setup` again, holds one copy.
    may_not_divide = context.is_spare or context.is_trial
    divides = isinstance(size, int) and size >= 2 and (may_not_divide or num_workers % size == 0)
    if sync_options.shard == "whole" or not divides:
        raise ConfigurationError(
            "register(dp_shard_size=...) does not fit",
            expected='units, as of register(shard="auto"), and equal groups of at least 2 workers',
            got=f"dp_shard_size={size!r:.40}, {num_workers} workers,"
            f" shard={sync_options.shard!r:.40}",
            fix="a number that divides num_workers; or leave it out",
        )


def check_own_wrapper(options: Options) -> None:
    """Refuse windows of several batches where a wrapper of the user's own synchronises.

    Raises:
        ConfigurationError: nobody would divide the window's gradient by its weights.
    """
    if options.accumulate > 1 and not options.wrap_ddp:
        raise ConfigurationError(
            f"accumulate={options.accumulate} needs lockstep's synchronisation, which"
            " wrap_ddp=False turned off",
            cause="the gradients of a window are divided once, by the weights of all its batches;"
            " a wrapper of your own adds them up",
            fix="TorchTrainer(..., wrap_ddp=True); or leave accumulate out, and write the window in"
            " a loop of your own",
        )


def _synchroniser(registered: TrainingParts, context: RankContext) -> Synchroniser:
    sync, ddp_args = context.options.sync, registered.sync_options.ddp_args
    if ddp_args and sync not in ("ddp", ONE_PROCESS, ONE_PROCESS_BY_SHARD):
        raise ConfigurationError(
            "ddp_args were given, but the gradients are not synchronised by torch's DDP",
            got=f"ddp_args={dict(ddp_args)!r}",
            fix='leave them out, or write TorchTrainer(..., sync="ddp")',
        )
    return _BY_NAME[sync](registered, context)


def _replicate(registered: TrainingParts, context: RankContext) -> Synchroniser:
    return GradientSync(
        registered.modules(),
        context.group,
        bucket_cap_mb=context.options.bucket_cap_mb,
        broadcast=registered.sync_options.resume_step is None,
        buffers=registered.sync_options.buffers,
        averages=registered.sync_options.averages,
        order=shard_order(context),
    )


def _single_process(registered: TrainingParts, context: RankContext) -> Synchroniser:
    expect_alone([*registered.optimizers, *registered.inner_optimizers()])
    return SingleProcess(registered.modules(), averages=registered.sync_options.averages)


def _ddp(registered: TrainingParts, context: RankContext) -> Synchroniser:
    # Imported only for sync="ddp": torch's DDP brings the compiler.
    with pause_gc():
        import_module(COMPILER)
    from lockstep.sync.ddp_sync import DDPSync

    sync = DDPSync(
        registered.modules(),
        context.group,
        ddp_args=registered.sync_options.ddp_args,
        bucket_cap_mb=context.options.bucket_cap_mb,
        buffers=registered.sync_options.buffers,
        averages=registered.sync_options.averages,
    )
    registered.replace_modules(sync.models)
    return sync


def _fsdp(registered: TrainingParts, context: RankContext) -> Synchroniser:
    if context.group.is_alone:
        return _replicate(registered, context)  # one rank: there is nothing to shard
    if registered.sync_options.shard != "whole":
        return _sharded(registered, context)
    if registered.sync_options.mp_policy is not None:
        raise ConfigurationError(
            "register(mp_policy=...) is for a model in shards",
            got='shard="whole"',
            fix='register(shard="auto", mp_policy=...), or TorchTrainer(precision="bf16")',
        )
    # Imported only for sync="fsdp": the module brings torch's DTensor.
    from lockstep.sync.fsdp import FSDPSync

    return FSDPSync(
        registered.modules(),
        context.group,
        registered.optimizers,
        bucket_cap_mb=context.options.bucket_cap_mb,
        buffers=registered.sync_options.buffers,
        averages=registered.sync_options.averages,
    )


def _sharded(registered: TrainingParts, context: RankContext) -> Synchroniser:
    if registered.averages:
        raise NotAvailableError(
            "there are no averages of a model in shards",
            got="register(ema=...)",
            cause="an average would hold the whole weights on every rank",
            fix='leave ema out, or register(shard="whole")',
        )
    if context.options.precision == "fp16":
        raise NotAvailableError(
            "float16 is not available for a model in shards",
            got='precision="fp16"',
            cause="each rank would find infinities in its own rows alone, and skip other steps",
            fix='precision="bf16", or register(shard="whole")',
        )
    from lockstep.sync.sharded_sync import ShardedSync

    models = registered.plain_models()
    registered.whole_models = copy_models(models, torch.device("meta"))
    registered.whole_places = places_of_modules(models)
    return ShardedSync(
        registered.modules(),
        context.group,
        registered.optimizers,
        shard=registered.sync_options.shard,
        mp_policy=registered.sync_options.mp_policy,
        dp_shard_size=registered.sync_options.dp_shard_size,
        device=context.device,
        buffers=registered.sync_options.buffers,
        averages=registered.sync_options.averages,
    )


def _parameter_server(registered: TrainingParts, context: RankContext) -> Synchroniser:
    before = registered.sync  # of the generation before
    return ParameterServerSync(
        registered.modules(),
        registered.optimizers,
        context.group,
        context.server_address,
        resume_step=registered.sync_options.resume_step,
        predecessor=before if isinstance(before, ParameterServerSync) else None,
        bucket_cap_mb=context.options.bucket_cap_mb,
        broadcast=registered.sync_options.resume_step is None,
        buffers=registered.sync_options.buffers,
        averages=registered.sync_options.averages,
    )


def _data_parallel(registered: TrainingParts, context: RankContext) -> Synchroniser:
    devices = replica_devices(context.device, context.options.replicas)
    replicated = [DataParallelModel(model, devices) for model in registered.models]
    # Weights and windows are those of one worker, which has the whole batch. Attached last: a
    # refusal of the models above would leave the hooks on.
    sync = _replicate(registered, context)
    registered.replace_modules(replicated)
    return sync


_BY_NAME: dict[str, Callable[[TrainingParts, RankContext], Synchroniser]] = {
    "replicate": _replicate,
    ONE_PROCESS: _single_process,
    ONE_PROCESS_BY_SHARD: _single_process,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "parameter_server": _parameter_server,
    "data_parallel": _data_parallel,
}
