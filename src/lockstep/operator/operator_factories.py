# SPDX-License-Identifier: Apache-2.0
"""Class methods of `TrainingOperator`: operator classes made from functions, or around objects."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep._torch_compat import Loss
from lockstep.errors import ConfigurationError, WrongTypeError
from lockstep.operator.buffer_values import loader_into
from lockstep.operator.host_file_lock import host_lock
from lockstep.operator.registration import registered_parts
from lockstep.sync.optimizer_inspection import load_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from lockstep.operator.loop_protocols import Operator


def from_creators(
    base: type[Any],
    model_creator: Callable[[Any], Any],
    optimizer_creator: Callable[[Any, Any], Any],
    data_creator: Callable[[Any], Any] | None = None,
    loss_creator: Any = None,
    scheduler_creator: Callable[[Any, Any], Any] | None = None,
    serialize_data_creation: bool = True,
) -> type[Any]:
    """An operator class whose `setup` calls these functions, as RaySGD's did.

    Args:
        model_creator: ``config -> model`` or several models.
        optimizer_creator: ``(model or models, config) -> optimizer`` or several.
        data_creator: ``config -> train_loader`` or ``(train_loader, validation_loader)``.
        loss_creator: a loss class such as `nn.MSELoss`, or ``config -> criterion``.
        scheduler_creator: ``(optimizer or optimizers, config) -> scheduler`` or several.
        serialize_data_creation: one worker of a machine after the other calls `data_creator`,
            which may download. The lock is a file in the folder for temporary files, there only
            meanwhile.

    Returns:
        A subclass of `base` with `model(s)`, `optimizer(s)`, `criterion`, `scheduler(s)`.
    """
    for name, function in (
        ("model_creator", model_creator),
        ("optimizer_creator", optimizer_creator),
    ):
        if not callable(function):
            raise WrongTypeError(f"{name} is not callable", got=repr(function))

    class CreatorOperator(base):  # type: ignore[misc]
        def setup(self, config: Any) -> None:
            models = model_creator(config)
            optimizers = optimizer_creator(models, config)
            schedulers = scheduler_creator(optimizers, config) if scheduler_creator else None
            self.register(
                models=models,
                optimizers=optimizers,
                criterion=_criterion(loss_creator, config),
                schedulers=schedulers,
            )
            if data_creator is not None:
                with host_lock() if serialize_data_creation else nullcontext():
                    loaders = data_creator(config)
                _register_data(self, loaders)

        model = property(lambda self: registered_parts(self).models[0])
        models = property(lambda self: registered_parts(self).models)
        optimizer = property(lambda self: registered_parts(self).optimizers[0])
        optimizers = property(lambda self: registered_parts(self).optimizers)
        criterion = property(lambda self: registered_parts(self).criterion)
        schedulers = property(lambda self: registered_parts(self).schedulers or None)
        scheduler = property(lambda self: next(iter(registered_parts(self).schedulers), None))

    return CreatorOperator


def _criterion(loss_creator: Any, config: Any) -> Any:
    if loss_creator is None:
        return None
    if inspect.isclass(loss_creator) and issubclass(loss_creator, Loss):
        return loss_creator()
    return loss_creator(config)


def _register_data(operator: Operator, loaders: Any) -> None:
    if isinstance(loaders, tuple | list):
        if len(loaders) != 2 or isinstance(loaders, list):
            kind = type(loaders).__name__
            raise ConfigurationError(
                "data_creator returned something else than its loaders",
                expected="train_loader, or the tuple (train_loader, validation_loader)",
                got=f"a {kind} of {len(loaders)} items",
                fix="return train_loader, validation_loader",
            )
        operator.register_data(train_loader=loaders[0], validation_loader=loaders[1])
    else:
        operator.register_data(train_loader=loaders)


def from_model(
    base: type[Any],
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    criterion: Any = None,
    train_loader: Any = None,
    validation_loader: Any = None,
) -> type[Any]:
    """An operator class around your own objects.

    One worker trains the very objects. Several train copies, pickled together so that the
    optimizer still holds the model's parameters; after each `train()` and `load()` the
    trained state is loaded back into `model`, `optimizer` and `criterion`: what you handed
    in is what you look at. The other way nothing goes: `train` refuses an optimizer whose settings
    (a learning rate) were changed here while several workers train copies of it.
    """
    for name, given, kind in (
        ("model", model, nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        if not isinstance(given, kind):
            raise WrongTypeError(
                f"from_model takes one {name}, an instance",
                expected=f"a torch {kind.__name__}",
                got=f"{type(given).__name__}: {given!r:.80}",
                fix="for several, write a TrainingOperator and register lists in setup",
            )

    given_optimizer = GivenOptimizer(optimizer)
    has_module = isinstance(criterion, nn.Module)
    load_modules = loader_into(
        {"models.0": model, **({"criterion": criterion} if has_module else {})}
    )

    class ModelOperator(base):  # type: ignore[misc]
        _lockstep_given_optimizer = given_optimizer

        def setup(self, config: Any) -> None:
            given = (model, optimizer, criterion)
            if self._lockstep.context.is_trial or self._lockstep_trains_copies:
                # In one copy, so that the optimizer's copy holds the parameters of the model's.
                given = copy.deepcopy(given)
            self.model, self.optimizer, *rest = self.register(
                models=given[0], optimizers=given[1], criterion=given[2]
            )
            self.criterion = rest[0] if rest else None
            self.register_data(train_loader=train_loader, validation_loader=validation_loader)

        @staticmethod
        def _lockstep_load_into_instance(state: Mapping[str, Any]) -> None:
            load_modules(state)
            load_state(optimizer, copy.deepcopy(state["optimizers"][0]))
            given_optimizer.note_settings()

    return ModelOperator


class GivenOptimizer:
    """The optimizer that `from_model` was given, and the settings with which its copies train.

    A scheduler of the user's, or the user, may change settings of this object while several
    workers train copies of it, which then never hear of that.

    Args:
        optimizer: the very object.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.note_settings()

    def note_settings(self) -> None:
        """Note that the copies have the settings that the optimizer has now."""
        self._noted = _settings(self._optimizer.param_groups)

    def changes(self) -> list[str]:
        """The settings that were changed since the last `note_settings`, as text."""
        return _differences(self._noted, _settings(self._optimizer.param_groups))

    def differs_from(self, groups: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the settings are others than those in `groups`, as of a copy's state."""
        return bool(_differences(_settings(groups), _settings(self._optimizer.param_groups)))


def _settings(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers in parameter groups, and pairs of them; a bool may be a mode, such as `eval`."""
    found = []
    for group in groups:
        values = {name: _as_plain(value) for name, value in group.items() if name != "params"}
        found.append({name: value for name, value in values.items() if _is_numeric(value)})
    return found


def _as_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_plain(each) for each in value]
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_number else value


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _differences(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """What differs of the settings that both have: a scheduler adds some for itself."""
    if len(before) != len(now):
        return [f"{len(before)} -> {len(now)} parameter groups"]
    return [
        f"{name} {old[name]} -> {new[name]}"
        for old, new in zip(before, now, strict=True)
        for name in old
        if name in new and old[name] != new[name]
    ]
