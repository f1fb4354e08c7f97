# SPDX-License-Identifier: Apache-2.0
"""What an operator registered: checked, moved to its device, and tied to its peers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.errors import ConfigurationError, UnknownParameterError, WrongTypeError
from lockstep.keys import SCHEDULER_STEP_MANUAL
from lockstep.operator.agreement import agree_on_steps
from lockstep.operator.attachment import Wanted, attach
from lockstep.sync import ReplicatedModel, is_local

if TYPE_CHECKING:
    from lockstep.operator.setting import Setting
    from lockstep.sync import Synchroniser


@dataclass
class Registered:
    """The parts of a training run, each as a list, and what keeps their gradients one."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    criterion: Any
    models_given_alone: bool
    sync: Synchroniser | None
    wanted: Wanted
    attached: tuple[nn.Parameter, ...] = ()
    skeletons: tuple[nn.Module, ...] = ()

    def tie(self, setting: Setting) -> None:
        """Attach to the peers, and compare what the ranks registered.

        Collective:
            Every rank; see `attach`.
        """
        if not any(True for _ in self.parameters()):
            return
        self.sync = attach(self, setting, self.wanted)
        if setting.group.size == 1:
            return
        self.attached = tuple(self.parameters())
        try:
            agree_on_steps(setting.group, self)
        except BaseException:
            # Nobody gets hold of it, and its hooks would keep it on the parameters.
            self.sync.detach()
            raise

    def rejoin(self, setting: Setting) -> None:
        """Attach to the peers of another generation, which hold the same values already.

        Collective:
            Every rank; see `attach`.
        """
        self.wanted = replace(self.wanted, broadcast=False)
        self.tie(setting)

    def refuse_replaced(self) -> None:
        """Raise if a model holds parameters that it did not hold when it was registered.

        Nobody made them equal on all ranks, and nobody reduces their gradients: each rank
        would compute with a model of its own.

        Raises:
            UnknownParameterError: names them.
        """
        known = set(map(id, self.attached))
        found = [
            f"`{name}` {tuple(parameter.shape)}"
            for module in self.modules()
            for name, parameter in module.named_parameters()
            if id(parameter) not in known and not is_local(parameter)
        ]
        if not found:
            return
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise UnknownParameterError(
            "a registered model holds parameters that nobody synchronises",
            got=", ".join(found[:5]) + more,
            cause="they were added or replaced after register(), as in model.fc = nn.Linear(...)",
            fix="build the model completely before register(); to start from trained weights,"
            " make a new trainer whose setup() loads them, or copy values in place:"
            " parameter.data.copy_(...)",
        )

    def seal(self) -> None:
        """Where weights are in shards and were gathered for use: only the shards are left."""
        if self.sync is not None:
            self.sync.seal()

    def plain_models(self) -> list[nn.Module]:
        """The models without a wrapper of the user's own, or of ``torch.compile``."""
        return [_unwrapped(model) for model in self.models]

    def plain_modules(self) -> list[nn.Module]:
        """`modules()` without wrappers."""
        return [_unwrapped(module) for module in self.modules()]

    def remember_plain(self) -> None:
        """Keep copies of the models without their tensors: sharding changes them in place."""
        memo: dict[int, Any] = {}
        for model in self.plain_models():
            for parameter in model.parameters():
                empty = torch.empty_like(parameter, device="meta")
                memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            for buffer in model.buffers():
                memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        self.skeletons = tuple(copy.deepcopy(model, memo) for model in self.plain_models())

    def plain_criterion(self) -> Any:
        """The criterion without a wrapper."""
        is_module = isinstance(self.criterion, nn.Module)
        return _unwrapped(self.criterion) if is_module else self.criterion

    def replace_modules(self, modules: Sequence[nn.Module]) -> None:
        """Put what a way of synchronising made of `modules()` in their place, in their order."""
        self.models = list(modules[: len(self.models)])
        if len(modules) > len(self.models):
            self.criterion = modules[-1]

    def modules(self) -> list[nn.Module]:
        """The models, and the criterion where it is a module (it may hold parameters)."""
        extra = [self.criterion] if isinstance(self.criterion, nn.Module) else []
        return [*self.models, *extra]

    def parameters(self) -> Iterator[nn.Parameter]:
        # Once each: two modules may share some, and clipping would count those twice.
        yield from dict.fromkeys(p for module in self.modules() for p in module.parameters())

    def set_training(self, training: bool) -> None:
        for module in self.modules():
            module.train(training)


def _unwrapped(model: nn.Module) -> nn.Module:
    # A wrapper's names for the weights ("module.", "_orig_mod.") must not get into checkpoints.
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel | ReplicatedModel):
            inner: nn.Module = model.module
        else:
            inner = getattr(model, "_orig_mod", model)
        if inner is model:
            return model
        model = inner


def as_list(given: Any, kind: type, argument: str) -> list[Any]:
    """One object or a sequence of them as a list, each checked to be of `kind`."""
    items = list(given) if isinstance(given, Sequence) else [given]
    for item in items:
        if not isinstance(item, kind):
            hint = "call it first: pass an instance" if isinstance(item, type) else None
            raise WrongTypeError(
                f"register({argument}=...) was given something else",
                expected=f"a torch {kind.__name__}, or a list of them",
                got=f"{type(item).__name__}: {item!r:.80}",
                fix=hint,
            )
    if not items:
        raise ConfigurationError(f"register({argument}=...) was given an empty list")
    return items


def in_shape(given: Any, items: list[Any]) -> Any:
    """`items` as they were given: alone, in a tuple, or in a list; what was given if the same."""
    if not isinstance(given, Sequence):
        return items[0]
    if all(one is other for one, other in zip(given, items, strict=True)):
        return given
    return tuple(items) if isinstance(given, tuple) else items


def assemble(
    setting: Setting,
    *,
    models: Any,
    optimizers: Any,
    criterion: Any,
    schedulers: Any,
    wanted: Wanted,
) -> Registered:
    """Check, move to the device, and attach gradient synchronisation.

    Collective:
        With several workers every rank must register the same models in the same order;
        their structure is compared, rank 0's weights are broadcast, and the optimizers and
        schedulers are compared.
    """
    registered = Registered(
        models=as_list(models, nn.Module, "models"),
        optimizers=as_list(optimizers, torch.optim.Optimizer, "optimizers"),
        schedulers=_checked_schedulers(schedulers, setting.options.scheduler_step_freq),
        criterion=criterion,
        models_given_alone=isinstance(models, nn.Module),
        sync=None,
        wanted=wanted,
    )
    for module in registered.modules():
        module.to(setting.device)
    for optimizer in registered.optimizers:
        _move_state(optimizer)
    if setting.options.wrap_ddp:
        _refuse_strangers(registered)
        if not setting.is_spare:
            registered.tie(setting)
    return registered


def _checked_schedulers(schedulers: Any, step_freq: str | None) -> list[Any]:
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
        if isinstance(item, ReduceLROnPlateau) and step_freq not in (None, SCHEDULER_STEP_MANUAL):
            raise ConfigurationError(
                "ReduceLROnPlateau needs a metric, so it cannot step by itself",
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


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    # Momentum of an optimizer that has already stepped stays on the old device otherwise.
    # Modules keep their Parameter objects in `.to`, so the groups need nothing.
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())


def _refuse_strangers(registered: Registered) -> None:
    """An optimizer's parameter outside the registered modules would never be synchronised."""
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


def step_schedulers(schedulers: Sequence[Any]) -> None:
    for scheduler in schedulers:
        scheduler.step()


def update_schedulers(schedulers: Sequence[Any], metric: float) -> None:
    """Step by a metric those that take one; the others step as they always do."""
    for scheduler in schedulers:
        takes_no_metric = isinstance(scheduler, LRScheduler) and not isinstance(
            scheduler, ReduceLROnPlateau
        )
        scheduler.step() if takes_no_metric else scheduler.step(metric)
