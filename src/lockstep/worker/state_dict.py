# SPDX-License-Identifier: Apache-2.0
"""Converts a run's state to a dict of plain tensors and Python (`collect`), and loads it (`apply`).

`parts_of` lists what a state consists of: models, averages, optimizers and schedulers each have a
``state_dict``. A checkpoint, the state that a joining worker receives, the copy that `verify` makes
and the return to an older state all go through `collect` and `apply`. The undo of a single step
does not: it writes into the existing tensors (see `rollback`).

Loading a state is all or nothing: `state_refusals` compares everything that can be compared before
`apply` changes anything, and after a later error the caller restores a copy.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from lockstep._torch_compat import (
    WAS_STEPPED_ATTR,
    buffers_of,
    layout_versions,
    parameters_of,
    set_layout_versions,
)
from lockstep.checkpoint.plain_values import MAPPINGS
from lockstep.error_texts import first_of
from lockstep.errors import (
    CheckpointError,
    ConfigurationError,
    LockstepError,
    NotAvailableError,
)
from lockstep.host_memory import is_lack_of_memory
from lockstep.local_rows import LocalRows, first_row
from lockstep.operator import buffer_values
from lockstep.operator.model_copies import copy_attributes, copy_models, grow_copies
from lockstep.operator.trained_parameters import KEY as TRAINED_PARAMETERS
from lockstep.operator.trained_parameters import (
    changes_since_setup,
    names_since_setup,
    restore_trained_parameters,
)
from lockstep.phases import Phase, in_phase
from lockstep.sync.optimizer_inspection import load_state
from lockstep.tensor_copies import is_shard
from lockstep.tensor_tree import rebuild_container, tree_map
from lockstep.worker.local_state import with_local_state

if TYPE_CHECKING:
    from lockstep.operator import TrainingOperator
    from lockstep.operator.training_parts import TrainingParts

_log = logging.getLogger("lockstep")

_RENAMES: Final = re.compile(r"_orig\b|\bparametrizations\.")
"""What pruning, ``spectral_norm`` and parametrisations have in the names that they make."""

_AVERAGES: Final = "ema"
"""The key of the averages, which a state may lack: averages then begin at the state's weights."""

_INNER: Final = "inner_optimizers"
"""The key of the optimizers within optimizers. States of earlier versions lack them."""

_STEPPED_BY_LOOP: Final = "stepped_by_loop"
"""The key of `TrainingParts.stepped_by_loop`. States of earlier versions lack it."""

OPTIONAL: Final = (_AVERAGES, _INNER, _STEPPED_BY_LOOP)
"""The keys of parts that a state may lack."""

OPTIMIZER_CLASSES: Final = "optimizer_classes"
"""The key of the names of the optimizers' classes. States of earlier versions lack them."""


def parts_of(run: TrainingParts) -> dict[str, tuple[str, Sequence[Any]]]:
    """For each key of a state that holds a list of ``state_dict``s: the noun for one member in
    messages, and the registered members."""
    return {
        "models": ("model", run.plain_models()),
        _AVERAGES: ("average (ema)", run.averages),
        "optimizers": ("optimizer", run.optimizers),
        _INNER: ("inner optimizer", run.inner_optimizers()),
        "schedulers": ("scheduler", run.saved_schedulers()),
        _STEPPED_BY_LOOP: ("scheduler or GradScaler in self", run.stepped_by_loop),
    }


@in_phase(Phase.COPYING_STATE)
def collect(
    operator: TrainingOperator, run: TrainingParts, take: Callable[[Any], Any]
) -> dict[str, Any]:
    """Everything that the operator registered, on the CPU.

    Args:
        take: `copy_to_cpu`; or `move_to_cpu`, for a caller that is done with the state before
            training goes on.
    """
    state: dict[str, Any] = {
        key: [take(member.state_dict()) for member in members]
        for key, (_, members) in parts_of(run).items()
        if members or key not in OPTIONAL
    }
    is_module = isinstance(run.criterion, nn.Module)
    state["criterion"] = take(run.plain_criterion().state_dict()) if is_module else None
    state["precision"] = take(operator._lockstep.precision.state_dict())
    state[TRAINED_PARAMETERS] = changes_since_setup(run)
    state[buffer_values.KEY] = buffer_values.changes_since_setup(run)
    state[OPTIMIZER_CLASSES] = [type(optimizer).__name__ for optimizer in run.optimizers]
    state["operator"] = _operators_own_state(operator, take)
    state["global_step"] = operator._lockstep.committed
    state["ran_default_epoch"] = operator._lockstep.ran_default_epoch
    _warn_of_names(operator, run)
    return state


def _warn_of_names(operator: TrainingOperator, run: TrainingParts) -> None:
    """Say once that no process which begins with `setup` can load the state."""
    context = operator._lockstep.context
    names = [] if run.has_warned_of_names else names_since_setup(run)
    if names and context.world_rank == 0 and not context.is_trial:
        run.has_warned_of_names = True
        _log.warning(
            "Parameters have got other names since setup, %s: a state of this run does not load"
            " into the model that setup makes, in a run that resumes, in verify() or in a worker"
            " that joins. Prune or parametrise in setup, before register, or undo it before the"
            " state is saved: prune.remove(module, name)",
            first_of([f"`{name}`" for name in names], 4),
        )


def fix_of_names(got: str) -> str:
    """What to do about a state whose names are not the model's, by what is wrong with them."""
    if _RENAMES.search(got):
        return (
            "prune or parametrise in setup, before register, as the run had done when it was saved;"
            " or undo it before a save, as by prune.remove(module, name)"
        )
    return "build the trainer with the operator and config that the state was saved with"


def unsaved_parameters(
    run: TrainingParts, state: Mapping[str, Any] | None = None
) -> list[nn.Parameter]:
    """The parameters that a module's own ``state_dict`` leaves out, as one does of what is frozen.

    Args:
        state: of `collect`; None asks the modules.
    """
    modules = run.plain_modules()
    if state is None:
        states = [module.state_dict() for module in modules]
    else:
        states = [*state["models"], state.get("criterion") or {}][: len(modules)]
    return [
        parameter
        for module, saved in zip(modules, states, strict=True)
        for name, parameter in module.named_parameters()
        if name not in saved
    ]


def _operators_own_state(operator: TrainingOperator, take: Callable[[Any], Any]) -> Any:
    """Convert the result of the user's `state_dict`."""
    try:
        return take(operator.state_dict())
    except TypeError as error:
        raise uncopied_state_error(operator, error) from error


def uncopied_state_error(operator: TrainingOperator, error: TypeError) -> ConfigurationError:
    """The error for a result of the user's `state_dict` that `copy.deepcopy` refuses."""
    return ConfigurationError(
        f"{type(operator).__name__}.state_dict returned something that cannot be copied",
        cause=f"{type(error).__name__}: {error}",
        fix="return what can be pickled: numbers, strings, tensors, and dicts or lists of them",
    )


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered if `tensor` is a shard; then every rank has to call this."""
    if not is_shard(tensor):
        return tensor
    from lockstep.sync.parameter_shards import gather_whole

    return gather_whole(tensor)


def _clone_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def copy_to_cpu(value: Any, clone: Callable[[torch.Tensor], torch.Tensor] = _clone_to_cpu) -> Any:
    """The same structure with tensors copied to the CPU, which later training does not change.

    Args:
        clone: copies one tensor to the CPU, into memory of its choice.
    """
    return _convert(value, clone, copy.deepcopy)


def copy_own_rows(
    value: Any,
    clone: Callable[[torch.Tensor], torch.Tensor] = _clone_to_cpu,
    clone_whole: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """As `copy_to_cpu`, with `LocalRows` in the place of shards. Communicates nothing.

    Args:
        clone: copies rows to the CPU.
        clone_whole: copies what is no shard; by default as `clone`.

    Raises:
        NotAvailableError: a tensor of which each rank has a part that has yet to be added up.
    """

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        if not is_shard(leaf):
            return (clone_whole or clone)(leaf.detach())
        shard: Any = leaf
        if any(each.is_partial() for each in shard.placements):
            raise _partial_error(shard)
        rows = clone(shard.to_local().detach())
        if not shard.dim() or not shard.placements[0].is_shard():
            return rows
        mesh = shard.device_mesh
        # Also after the ranks have left their group, which `get_local_rank` would ask.
        (place,) = mesh.get_coordinate()
        first = first_row(shard.shape[0], place, mesh.size())
        return LocalRows(rows, shard.shape, first)

    return tree_map(copy_leaf, value, as_plain_dict)


def _partial_error(partial: torch.Tensor) -> NotAvailableError:
    return NotAvailableError(
        "a state holds this rank's part of a sum over all ranks",
        got=f"a norm, a sum or a mean of what is in shards, of shape {tuple(partial.shape)}",
        cause="torch adds up the parts when the number is used",
        fix="keep the number itself: value.item(), or value.full_tensor()",
    )


def gather_for_others(value: Any) -> Any:
    """Take part in the gathers of `copy_to_cpu` on another rank; keeps nothing of what is gathered.

    Collective:
        Every rank of a shard's mesh: an all-gather for each shard in `value`.
    """

    def take_part(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        whole = gather_whole(leaf.detach())
        return leaf if whole is leaf else torch.empty(0)

    return tree_map(take_part, value, as_plain_dict)


def move_to_cpu(value: Any) -> Any:
    """The same structure with tensors moved to the CPU; does not copy CPU tensors."""
    return _convert(value, lambda tensor: tensor.to("cpu"), lambda leaf: leaf)


def _convert(
    value: Any, move: Callable[[torch.Tensor], torch.Tensor], keep: Callable[[Any], Any]
) -> Any:
    def convert(leaf: Any) -> Any:
        return move(gather_whole(leaf.detach())) if isinstance(leaf, torch.Tensor) else keep(leaf)

    return tree_map(convert, value, as_plain_dict)


def as_plain_dict(like: Any, values: list[Any]) -> Any:
    """Rebuild a structure, with dicts for mappings of a class that no checkpoint holds."""
    if not isinstance(like, Mapping):
        return rebuild_container(like, values)
    # A module's `state_dict()` carries the versions of its layouts.
    metadata = layout_versions(like)
    kind = OrderedDict if metadata is not None else type(like)
    # `MultiStepLR` steps by methods that its Counter of milestones has and a dict has not.
    copies: dict[Any, Any] = cast("Any", kind)() if kind in MAPPINGS else {}
    for key, value in zip(like, values, strict=True):
        copies[key] = value
    if metadata is not None:
        set_layout_versions(copies, copy.deepcopy(metadata))
    return copies


@in_phase(Phase.COPYING_STATE)
def apply(operator: TrainingOperator, run: TrainingParts, state: Mapping[str, Any]) -> None:
    """Load `state` into models, optimizers, schedulers, criterion and operator."""
    load_parts(run, state)
    operator._lockstep.precision.load_state_dict(state.get("precision") or {})
    operator._lockstep.committed = operator.global_step = int(state.get("global_step", 0))
    operator._lockstep.ran_default_epoch = bool(state.get("ran_default_epoch"))
    if operator.global_step:
        for optimizer in run.optimizers:  # a scheduler's warning does not know of other processes
            vars(optimizer)[WAS_STEPPED_ATTR] = True
    if state.get("operator") is not None:
        operator.load_state_dict(copy.deepcopy(state["operator"]))


def load_parts(run: TrainingParts, state: Mapping[str, Any]) -> None:
    """Load `state` into what `run` has: all of it, or the user's own objects in the driver."""
    restore_trained_parameters(run, state)
    state = with_local_state(run, state)  # by the numbers that parameters have in the groups now
    of_same_weights = _has_same_dtypes(run, state)
    for key, (_, members) in parts_of(run).items():
        if not members:
            continue
        if key in OPTIONAL and not state.get(key):
            if key == _AVERAGES:
                _begin_averages(run)
            continue
        for index, (member, saved) in enumerate(zip(members, state.get(key) or [], strict=True)):
            if isinstance(member, nn.Module):
                _load_module(run, state, f"{key}.{index}", saved, of_same_weights)
            else:
                # Optimizers keep the tensors that they load, which another object may hold.
                load_state(member, copy_to_cpu(saved), of_same_weights=of_same_weights)
    if isinstance(run.criterion, nn.Module) and state.get("criterion") is not None:
        _load_module(run, state, "criterion", state["criterion"], of_same_weights)


def _has_same_dtypes(run: TrainingParts, state: Mapping[str, Any]) -> bool:
    """Whether the weights in `state` have the dtypes of the models'."""
    return all(
        _dtype(saved[key]) == held.dtype
        for model, saved in zip(run.plain_models(), state["models"], strict=True)
        for key, held in model.named_parameters()
        if key in saved
    )


def _dtype(saved: object) -> torch.dtype | None:
    whole = saved.rows if isinstance(saved, LocalRows) else saved
    return whole.dtype if isinstance(whole, torch.Tensor) else None


def _begin_averages(run: TrainingParts) -> None:
    """Set averages to the present weights, as before the first average."""
    for model, average in zip(run.plain_models(), run.averages, strict=False):
        average.n_averaged.zero_()
        average.update_parameters(model)
        average.n_averaged.zero_()


def _load_module(
    run: TrainingParts,
    state: Mapping[str, Any],
    label: str,
    saved: Mapping[str, Any],
    of_same_weights: bool,
) -> None:
    module = buffer_values.labelled_modules(run)[label]
    try:
        buffer_values.load_module(
            module,
            _own_rows(module, saved),
            first=run.buffers_after_setup[label],
            changed=buffer_values.changed_in(state, label),
            of_same_weights=of_same_weights,
        )
    except LockstepError:
        raise
    except RuntimeError as error:
        if is_lack_of_memory(error):
            raise
        # What a module that converts states makes of one nobody knows before it is tried.
        got = " ".join(str(error).split())
        raise CheckpointError(
            "a module does not load its part of the state",
            where=label,
            got=got,
            fix=fix_of_names(got),
        ) from error


def _own_rows(module: nn.Module, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """`saved`, with this rank's rows of the weights that `module` has in shards."""
    shards = {key: held for key, held in module.state_dict().items() if is_shard(held)}
    if not shards:
        return saved
    from lockstep.sync.parameter_shards import shard_like

    return {k: shard_like(v, shards[k]) if k in shards else v for k, v in saved.items()}


def averaged_models(run: TrainingParts) -> list[nn.Module]:
    """The models with the averages of their weights."""
    if run.averages:
        return [average.module for average in run.averages]
    raise ConfigurationError(
        "there is no average of the weights",
        got="register() without ema",
        fix="self.register(..., ema=0.999) in setup",
    )


@in_phase(Phase.COPYING_STATE)
def model_copies(run: TrainingParts, models: list[nn.Module]) -> nn.Module | list[nn.Module]:
    """Copies of `models` on the CPU, without gradients, hooks or any trace of lockstep.

    Parameters and buffers are moved before the modules are copied, so that a device that is
    nearly full need not hold a second model.
    """
    copies = copy_models(models, torch.device("cpu"))
    return copies[0] if run.models_given_alone else copies


@in_phase(Phase.COPYING_STATE)
def gather_models(run: TrainingParts, *, keep: bool) -> nn.Module | list[nn.Module] | None:
    """`model_copies` of models that are in shards; None on ranks that do not `keep` them.

    Collective:
        Every rank: an all-gather for each parameter.
    """
    models = run.plain_models()
    empty = copy_models(run.whole_models, torch.device("meta")) if keep else []
    copies = grow_copies(models, empty, run.whole_places) if keep else {}
    filled: dict[int, torch.Tensor] = {}
    for part in dict.fromkeys(part for model in models for part in model.modules()):
        for table in (parameters_of, buffers_of):
            held_there: dict[str, Any] = table(copies[part]) if keep else {}
            for key, held in table(part).items():
                if held is not None and id(held) not in filled:
                    filled[id(held)] = _gathered(held, keep=keep)
                if held is not None:
                    held_there[key] = filled[id(held)]
    if not keep:
        return None
    copy_attributes(copies, filled)
    return empty[0] if run.models_given_alone else empty


def _gathered(held: torch.Tensor, *, keep: bool) -> torch.Tensor:
    whole = gather_whole(held.detach())
    if not keep:
        return torch.empty(0)
    copied = whole.to("cpu", copy=True)
    if isinstance(held, nn.Parameter):
        return nn.Parameter(copied, requires_grad=held.requires_grad)
    return copied
