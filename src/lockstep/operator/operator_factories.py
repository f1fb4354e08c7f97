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
from lockstep.operator.given_objects import GivenObjects
from lockstep.operator.host_file_lock import host_lock
from lockstep.operator.registration import registered_parts

if TYPE_CHECKING:
    from collections.abc import Callable

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

    class ModelOperator(base):  # type: ignore[misc]
        _lockstep_given = GivenObjects(model, [optimizer], criterion)

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

    return ModelOperator
