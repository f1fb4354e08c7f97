# SPDX-License-Identifier: Apache-2.0
"""The work of `register`: checks models, optimizers and schedulers, and moves them to the device.

It also attaches the synchronisation of gradients (`sync_setup`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lockstep._torch_compat import buffers_of, is_persistent, schedulers_within
from lockstep.errors import ConfigurationError, UnknownParameterError, WrongTypeError
from lockstep.keys import SCHEDULER_STEP_MANUAL
from lockstep.operator.buffer_values import buffer_shapes, labelled_modules
from lockstep.operator.custom_loop_refusals import (
    refuse_assigned_methods,
    refuse_kept_parts,
    refuse_late_reduction,
)
from lockstep.operator.mixed_precision import members_of
from lockstep.operator.shadow import refuse_local_tensors
from lockstep.operator.sync_setup import attach, check_shard_size, is_in_units
from lockstep.operator.training_parts import TrainingParts
from lockstep.operator.weight_averages import make_weight_averages
from lockstep.sync import is_local
from lockstep.sync.local_parameters import mark_copies
from lockstep.sync.meta_device import initialise, is_on_meta
from lockstep.sync.replica_checks import batch_dependent_embedding_error
from lockstep.sync.shard_units import check_policy, find_units
from lockstep.sync.synced_tensors import batch_dependent_options

if TYPE_CHECKING:
    from lockstep.operator.loop_protocols import Operator
    from lockstep.operator.rank_context import RankContext
    from lockstep.operator.training_parts import SyncOptions


class _DefaultReduction(str):
    """The default "mean" of `loss_reduction`, told from a "mean" that the user passed.

    Only the default leaves a class attribute ``loss_reduction = "sum"`` in force.
    """

    __slots__ = ()


_METRICS: Final = {"metric", "metrics"}
"""The parameters of a scheduler's `step` that take what is given to `trainer.update_scheduler`."""

DEFAULT_MEAN: Final = _DefaultReduction("mean")


def refuse_unknown_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that `register` does not take; for RaySGD's, say what to write instead."""
    for name, value in arguments.items():
        if name == "apex_args":
            raise ConfigurationError(
                "register takes no apex_args",
                got=f"apex_args={value!r:.60}",
                cause="apex is not used any more: mixed precision is torch's own",
                fix='TorchTrainer(..., precision="bf16"), or precision="fp16"',
            )
        is_data = "loader" in name or name in ("data", "dataset")
        raise WrongTypeError(
            f"register has no argument {name!r}",
            fix="self.register_data(train_loader=..., validation_loader=...)" if is_data else None,
        )


def as_sequence(given: Any) -> Any:
    """The items of a dict view, a generator or a set as a list; everything else as it is."""
    is_plain = isinstance(given, Sequence | Mapping | nn.Module)
    return list(given) if isinstance(given, Iterable) and not is_plain else given


def require_single_loader(purpose: str, given: Any) -> Any:
    """`given`, if it is one loader; the loops would take several loaders for batches."""
    items = list(given.values()) if isinstance(given, Mapping) else given
    if isinstance(items, list | tuple) and any(isinstance(each, DataLoader) for each in items):
        raise WrongTypeError(
            f"register_data({purpose}_loader=...) takes one loader",
            got=f"a {type(given).__name__} of {len(items)}",
            fix="one DataLoader over torch.utils.data.ConcatDataset([...]) for the samples of one"
            " after those of the other, over StackDataset(...) for pairs of them",
        )
    return given


def as_list(given: Any, kind: type, argument: str) -> list[Any]:
    """One object or a sequence of them as a list, each checked to be of `kind`."""
    items = list(given) if isinstance(given, Sequence) else [given]
    for item in items:
        if not isinstance(item, kind):
            hint = "call it first: pass an instance" if isinstance(item, type) else None
            if isinstance(given, Mapping):
                hint = f"{argument}=list(the_dict.values())"
            raise WrongTypeError(
                f"register({argument}=...) was given something else",
                expected=f"a torch {kind.__name__}, or a list of them",
                got=f"{type(item).__name__}: {item!r:.80}",
                fix=hint,
            )
    if not items:
        raise ConfigurationError(f"register({argument}=...) was given an empty list")
    return items


def in_given_container(given: Any, items: list[Any]) -> Any:
    """`items` as `given` is: alone, in a tuple, or in a list; `given` itself if unchanged."""
    if not isinstance(given, Sequence):
        return items[0]
    if all(one is other for one, other in zip(given, items, strict=True)):
        return given
    return tuple(items) if isinstance(given, tuple) else items


def in_given_containers(
    registered: TrainingParts, models: Any, optimizers: Any, schedulers: Any
) -> tuple[Any, ...]:
    """The tuple that `register` returns: each argument in the shape given; None is left out."""
    parts = [
        in_given_container(models, registered.models),
        in_given_container(optimizers, registered.optimizers),
    ]
    parts += [registered.criterion] if registered.criterion is not None else []
    parts += [schedulers] if schedulers is not None else []
    parts += [in_given_container(models, registered.averages)] if registered.averages else []
    return tuple(parts)


def build_training_parts(
    context: RankContext,
    *,
    models: Any,
    optimizers: Any,
    criterion: Any,
    schedulers: Any,
    sync_options: SyncOptions,
    ema: Any = None,
) -> TrainingParts:
    """Check, move to the device, and attach gradient synchronisation.

    Collective:
        With several workers every rank must register the same models in the same order;
        their structure is compared, rank 0's weights are broadcast, and the optimizers and
        schedulers are compared.
    """
    registered = TrainingParts(
        models=as_list(models, nn.Module, "models"),
        optimizers=as_list(optimizers, torch.optim.Optimizer, "optimizers"),
        schedulers=_parse_schedulers(schedulers, context.options.scheduler_step_freq),
        criterion=_require_criterion(criterion),
        models_given_alone=isinstance(models, nn.Module),
        sync=None,
        sync_options=sync_options,
    )
    check_policy(sync_options.shard)
    check_shard_size(sync_options, context)
    mark_copies(registered.modules())
    _refuse_duplicates(registered.optimizers)
    _refuse_foreign_schedulers(registered)
    for module in registered.modules():
        _refuse_buffers(module)
    if context.shard_assignment.num_shards > 1:
        _refuse_scaling_by_frequency(registered)
    for module in registered.modules():
        _move(module, registered, context)
    for optimizer in registered.optimizers:
        _move_state(optimizer)
    # Averages are made before the hooks: a copy of a model with hooks would have them, too.
    registered.averages = make_weight_averages(ema, registered.plain_models(), context.device)
    if context.options.wrap_ddp:
        _refuse_foreign_parameters(registered)
        # A spare has no peers yet; but the user's code holds DDP's wrapper from now on, or shards.
        if not context.is_spare or context.options.sync in ("ddp", "fsdp"):
            attach(registered, context)
        if context.is_spare and context.group.is_alone:
            registered.leave_group()
    return registered


def _move(module: nn.Module, registered: TrainingParts, context: RankContext) -> None:
    """Move a module to the rank's device; what is on ``meta`` gets its values there."""
    if not is_on_meta(module):
        module.to(context.device)
    elif not is_in_units(registered, context):
        has_units = any(True for _ in module.parameters())
        units = find_units(module, registered.sync_options.shard) if has_units else {}
        initialise(module, units.values(), context.device)


def _parse_schedulers(schedulers: Any, step_freq: str | None) -> list[Any]:
    if schedulers is None:
        return []
    items = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
    for item in items:
        if isinstance(item, type) or not callable(getattr(item, "step", None)):
            raise WrongTypeError(
                "register(schedulers=...) was given something that cannot step",
                expected="a torch.optim.lr_scheduler object, or a list of them",
                got=f"{type(item).__name__}: {item!r:.80}",
            )
        needed = _needed_by_step(item)
        if needed and step_freq not in (None, SCHEDULER_STEP_MANUAL):
            if not needed <= _METRICS:
                raise _unknown_argument_error(item, needed, step_freq)
            raise ConfigurationError(
                f"{type(item).__name__} needs a metric, so it cannot step by itself",
                got=f"scheduler_step_freq={step_freq!r}",
                fix='TorchTrainer(..., scheduler_step_freq="manual") and'
                " trainer.update_scheduler(metric) after each validate()",
            )
    if items and step_freq is None:
        raise ConfigurationError(
            "schedulers were registered, but nothing says when they step",
            expected='scheduler_step_freq="batch", "epoch" or "manual"',
            got="scheduler_step_freq=None",
            fix='TorchTrainer(..., scheduler_step_freq="epoch")',
        )
    return items


def _require_criterion(given: Any) -> Any:
    if given is None or (callable(given) and not isinstance(given, type)):
        return given
    raise WrongTypeError(
        "register(criterion=...) was given something else than a loss",
        expected="a module or a function of (output, target)",
        got=f"{type(given).__name__}: {given!r:.80}",
        fix="call it first: pass an instance" if isinstance(given, type) else None,
    )


def _refuse_duplicates(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if len(set(map(id, optimizers))) < len(optimizers):
        raise ConfigurationError(
            "register(optimizers=...) was given one optimizer twice",
            cause="it would step twice with the same gradients",
            fix="pass it once",
        )


def _refuse_foreign_schedulers(registered: TrainingParts) -> None:
    """Refuse schedulers of optimizers that were not registered: the run would ignore them."""
    # Compare groups and not optimizers: a wrapper of an optimizer shares its groups.
    groups = _ids_of_groups(registered)
    for number, scheduler in enumerate(registered.schedulers):
        optimizer = getattr(scheduler, "optimizer", None)
        held = getattr(optimizer, "param_groups", None)
        if held and not any(id(group) in groups for group in held):
            raise ConfigurationError(
                "a scheduler belongs to an optimizer that is not registered",
                where=f"scheduler {number} ({type(scheduler).__name__})",
                got=f"a {type(optimizer).__name__} that is none of register(optimizers=...)",
                cause="the optimizer was made twice, or the scheduler's own one was left out: the"
                " learning rate of the run would never change",
                fix="make the scheduler from the optimizer that is registered",
            )


def _ids_of_groups(registered: TrainingParts) -> set[int]:
    return {id(group) for each in registered.optimizers for group in each.param_groups}


def _refuse_scaling_by_frequency(registered: TrainingParts) -> None:
    """Refuse, on one worker too, a gradient that depends on the shard that a row is in."""
    option = "scale_grad_by_freq"
    scaled = [
        f"`{name}.weight`".replace("`.", "`")
        for module in registered.modules()
        for name, part in module.named_modules()
        if option in batch_dependent_options(part)
    ]
    if scaled:
        raise batch_dependent_embedding_error({option: scaled})


def conclude_setup(operator: Operator, registered: TrainingParts, returned: Any) -> None:
    """Refuse a value that `setup` returned, and a model whose shards have no shadow; take over
    schedulers and GradScalers that it left in `self`, and note which parameters train and what
    buffers there are."""
    if returned is not None:
        raise WrongTypeError(
            "setup returned something, which nobody reads",
            where=type(operator).__name__,
            expected="None",
            got=f"{type(returned).__name__}: {returned!r:.60}",
            fix="self.register(models=..., optimizers=...) and self.register_data(...)",
        )
    if operator._lockstep.shadow is not None:
        refuse_local_tensors(registered.plain_modules())
    refuse_assigned_methods(operator)
    refuse_late_reduction(operator)
    refuse_kept_parts(operator)
    _take_schedulers(operator, registered)
    registered.trained_after_setup = registered.trained_parameters()
    modules = labelled_modules(registered)
    registered.buffers_after_setup = {name: buffer_shapes(each) for name, each in modules.items()}


def _take_schedulers(operator: Operator, registered: TrainingParts) -> None:
    """Step, save and load `self.scheduler` as if it had been registered: RaySGD stepped it.

    A scheduler of another name is refused, unless a loop of the user's own may step it. Then it is
    saved, loaded and undone like a GradScaler, which such a loop steps as well.

    Raises:
        ConfigurationError: nothing says when it steps, or the default loop was left a scheduler
            of another name.
    """
    known = _ids_with_chained(registered.schedulers)
    found = [
        (name, scheduler)
        for name, value in vars(operator).items()
        for scheduler in _schedulers_in(value, registered.optimizers)
        if id(scheduler) not in known
    ]
    step_freq = operator.scheduler_step_freq
    own_loop = operator._lockstep_overrides_loop()
    if own_loop or step_freq is not None:
        for name, scheduler in found:
            if name == "scheduler":
                registered.schedulers += (
                    [scheduler] if step_freq is None else _parse_schedulers(scheduler, step_freq)
                )
        known = _ids_with_chained(registered.schedulers)
    left = [(name, scheduler) for name, scheduler in found if id(scheduler) not in known]
    if left and not own_loop:
        name, scheduler = left[0]
        raise ConfigurationError(
            f"self.{name} is a learning-rate scheduler that nothing steps",
            where=type(operator).__name__,
            got=f"{type(scheduler).__name__}, not registered,"
            f" and scheduler_step_freq={step_freq!r}",
            fix="self.register(..., schedulers=...) in setup, and"
            ' TorchTrainer(..., scheduler_step_freq="epoch"), "batch", or "manual" if code of your'
            " own steps it",
        )
    registered.stepped_by_loop = _with_state(operator, registered, [each for _, each in left])


def _with_state(
    operator: Operator, registered: TrainingParts, schedulers: Sequence[Any]
) -> list[Any]:
    """Those of `schedulers` that can be saved with their optimizer, and the GradScalers."""
    groups = _ids_of_groups(registered)
    held = [
        each
        for each in schedulers
        if hasattr(each, "state_dict")
        and any(id(group) in groups for group in each.optimizer.param_groups)
    ]
    values = vars(operator).values()
    members = chain.from_iterable(map(members_of, values))
    scalers = [each for each in members if isinstance(each, GradScaler)]
    return [*{id(each): each for each in (*held, *scalers)}.values()]


def _schedulers_in(value: Any, optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """The schedulers of `optimizers` in an attribute."""
    return [
        item
        for item in members_of(value)
        if isinstance(item, LRScheduler)
        # Schedulers of other packages do not derive from torch's class.
        or (
            callable(getattr(item, "step", None))
            and any(getattr(item, "optimizer", None) is each for each in optimizers)
        )
    ]


def _ids_with_chained(schedulers: Sequence[Any]) -> set[int]:
    """The ids of schedulers, and of the schedulers that a ``ChainedScheduler`` among them steps."""
    found = set(map(id, schedulers))
    for scheduler in schedulers:
        found |= _ids_with_chained(schedulers_within(scheduler))
    return found


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    # Loading its own state moves the momentum of an optimizer that has stepped to the parameters'
    # device. The groups need nothing: `module.to` keeps the Parameter objects.
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _refuse_buffers(module: nn.Module) -> None:
    """Refuse, before the run, buffers with which no checkpoint could be written or loaded."""
    for path, part in module.named_modules():
        for key, buffer in buffers_of(part).items():
            if buffer is None:
                continue
            where = f"buffer `{path}.{key}`".replace("`.", "`")
            if buffer.is_mkldnn:
                raise ConfigurationError(
                    "a buffer is an MKL-DNN tensor, which can be neither copied nor sent",
                    where=where,
                    fix="keep it as `.to_dense()`, and convert it in forward",
                )
            if buffer.is_nested and is_persistent(part, key):
                raise ConfigurationError(
                    "a buffer is a nested tensor, which no checkpoint can hold",
                    where=where,
                    fix="register_buffer(name, tensor, persistent=False), and make it in setup()",
                )


def _refuse_foreign_parameters(registered: TrainingParts) -> None:
    """Refuse optimizers' parameters outside the registered modules: they are not synchronised."""
    known = {id(parameter) for parameter in registered.parameters()}
    for index, optimizer in enumerate(registered.optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) in known or is_local(parameter):
                    continue
                raise UnknownParameterError(
                    "an optimizer holds a parameter that belongs to no registered module",
                    where=f"optimizer {index} ({type(optimizer).__name__}), group {number},"
                    f" parameter {position}, shape {tuple(parameter.shape)}",
                    cause="the optimizer was made from another copy of the model, or the"
                    " parameter lives outside every registered module: its gradient would"
                    " differ between workers",
                    fix="make the optimizer from the registered model's parameters(), put the"
                    " parameter into a module that is registered, or mark it with"
                    " lockstep.local(parameter) if it differs between workers by design",
                )


def registered_parts(operator: Operator) -> TrainingParts:
    """The models, optimizers and schedulers that `operator` registered in its `setup`.

    Raises:
        ConfigurationError: `setup` did not call `register`.
    """
    run = operator._lockstep.registered
    if run is None:
        raise ConfigurationError(
            f"{type(operator).__name__} has no model to train",
            fix="call self.register(models=..., optimizers=...) inside setup",
        )
    return run


def step_schedulers(schedulers: Sequence[Any]) -> None:
    for scheduler in schedulers:
        scheduler.step()


def update_schedulers(schedulers: Sequence[Any], metric: float) -> None:
    """Step all schedulers, those whose `step` has a parameter of that name with `metric`.

    Raises:
        ConfigurationError: a `step` needs something else; none has stepped.
    """
    for scheduler in schedulers:
        if not (needed := _needed_by_step(scheduler)) <= _METRICS:
            raise _unknown_argument_error(scheduler, needed, SCHEDULER_STEP_MANUAL)
    for scheduler in schedulers:
        scheduler.step(**dict.fromkeys(_METRICS & _parameters_of_step(scheduler).keys(), metric))


def _parameters_of_step(scheduler: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(scheduler.step).parameters
    except ValueError:  # written in C
        return {}


def _needed_by_step(scheduler: Any) -> set[str]:
    """The parameters without a default of a scheduler's `step`."""
    parameters = _parameters_of_step(scheduler).values()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in parameters if p.default is p.empty and p.kind not in open_ended}


def _unknown_argument_error(
    scheduler: Any, needed: set[str], step_freq: str | None
) -> ConfigurationError:
    kind = type(scheduler).__name__
    return ConfigurationError(
        f"{kind} needs {', '.join(f'`{name}`' for name in sorted(needed))} to step",
        expected="a `step` without arguments, or one that takes `metric` or `metrics`",
        got=f"{kind}.step{inspect.signature(scheduler.step)}, scheduler_step_freq={step_freq!r}",
        fix='scheduler_step_freq="manual", and a call of it in a train_epoch of your own, with'
        ' info["epoch_idx"] for the epoch; or a subclass whose step() counts itself',
    )
