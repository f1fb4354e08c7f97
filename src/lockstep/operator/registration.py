# SPDX-License-Identifier: Apache-2.0
"""The work of `register`: checks models, optimizers and schedulers, and moves them to the device.

It also attaches the synchronisation of gradients (`sync_setup`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep._torch_compat import buffers_of, is_persistent
from lockstep.errors import ConfigurationError, UnknownParameterError, WrongTypeError
from lockstep.operator.buffer_values import buffer_kinds, labelled_modules
from lockstep.operator.custom_loop_refusals import (
    refuse_assigned_methods,
    refuse_kept_parts,
    refuse_late_reduction,
)
from lockstep.operator.hyperparameters import read_hyperparameters
from lockstep.operator.registered_schedulers import (
    parse_schedulers,
    refuse_foreign_schedulers,
    take_schedulers,
)
from lockstep.operator.shadow import refuse_local_tensors
from lockstep.operator.sync_setup import attach, check_shard_size, is_in_units
from lockstep.operator.training_parts import TrainingParts
from lockstep.operator.weight_averages import make_weight_averages
from lockstep.sync import is_local
from lockstep.sync.local_parameters import mark_copies
from lockstep.sync.meta_device import initialise, is_on_meta
from lockstep.sync.optimizer_inspection import optimizers_with_state
from lockstep.sync.replica_checks import batch_dependent_embedding_error
from lockstep.sync.shard_units import check_policy, find_units
from lockstep.sync.synced_tensors import batch_dependent_options, refuse_scripted
from lockstep.tensor_tree import leaves_with_path, tree_map_with_path

if TYPE_CHECKING:
    from lockstep.operator.loop_protocols import Operator
    from lockstep.operator.rank_context import RankContext
    from lockstep.operator.training_parts import SyncOptions
    from lockstep.tensor_tree import KeyPath


class _DefaultReduction(str):
    """The default "mean" of `loss_reduction`, told from a "mean" that the user passed.

    Only the default leaves a class attribute ``loss_reduction = "sum"`` in force.
    """

    __slots__ = ()


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
    has_own_epoch: bool = False,
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
        schedulers=parse_schedulers(
            schedulers, context.options.scheduler_step_freq, has_own_epoch=has_own_epoch
        ),
        criterion=_require_criterion(criterion),
        models_given_alone=isinstance(models, nn.Module),
        sync=None,
        sync_options=sync_options,
    )
    check_policy(sync_options.shard)
    check_shard_size(sync_options, context)
    refuse_scripted(registered.modules())
    mark_copies(registered.modules())
    _refuse_duplicates(registered.optimizers)
    refuse_foreign_schedulers(registered)
    for module in registered.modules():
        _refuse_buffers(module)
    if context.shard_assignment.num_shards > 1:
        _refuse_scaling_by_frequency(registered)
    for module in registered.modules():
        _move(module, registered, context)
    _move_state(registered.optimizers)
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
    schedulers and GradScalers that it left in `self`, and note which parameters train, what buffers
    there are, and the hyperparameters."""
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
    take_schedulers(operator, registered)
    note_setup(registered)
    registered.hyperparameters_after_setup = read_hyperparameters(registered)


def note_setup(registered: TrainingParts) -> None:
    """Note which parameters train, and what buffers there are: states hold what changes of it."""
    registered.trained_after_setup = registered.trained_parameters()
    modules = labelled_modules(registered)
    registered.buffers_after_setup = {name: buffer_kinds(each) for name, each in modules.items()}


def _move_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Move the state of optimizers that have stepped to the devices of their parameters.

    ``optimizer.load_state_dict(optimizer.state_dict())`` would move it as well, but round it to the
    parameters' dtypes, and put other groups in the place of those that the user may have kept.
    Groups need nothing: ``module.to`` keeps the Parameter objects.
    """
    for optimizer in optimizers_with_state(optimizers):
        for group in optimizer.param_groups:
            # As torch has it: the host reads a step count, unless a kernel does.
            keeps_step = not (group.get("capturable") or group.get("fused"))
            for param in group["params"]:
                if param in optimizer.state:
                    held = optimizer.state[param]
                    optimizer.state[param] = _on_device(held, param.device, keeps_step=keeps_step)


def _on_device(state: Any, device: torch.device, *, keeps_step: bool) -> Any:
    """One parameter's state with its tensors on `device`; the same objects where they are."""

    def is_elsewhere(path: KeyPath, leaf: Any) -> bool:
        stays = keeps_step and [key.value for key in path] == ["step"]
        return isinstance(leaf, torch.Tensor) and leaf.device != device and not stays

    if not any(is_elsewhere(path, leaf) for path, leaf in leaves_with_path(state)):
        return state
    return tree_map_with_path(
        lambda path, leaf: leaf.to(device) if is_elsewhere(path, leaf) else leaf, state
    )


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
