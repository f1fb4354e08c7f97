# SPDX-License-Identifier: Apache-2.0
"""`TrainingParts`: the models, optimizers, schedulers and criterion of an operator."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep._torch_compat import compiled_from
from lockstep.error_texts import first_of
from lockstep.errors import UnknownParameterError
from lockstep.sync import DataParallelModel, is_local, named_local_tensors
from lockstep.sync.optimizer_inspection import optimizer_parameters, optimizers_with_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.optim.swa_utils import AveragedModel

    from lockstep.sync import Synchroniser
    from lockstep.sync.shard_units import ShardPolicy

BufferKinds: TypeAlias = "Mapping[str, tuple[torch.Size, torch.dtype] | None]"
"""The shapes and dtypes of a module's persistent buffers; None for a buffer that is None."""

Hyperparameters: TypeAlias = "list[list[dict[str, Any]]]"
"""Of each optimizer those of its parameter groups; behind them of each scheduler with a state those
of its state, in a list of one."""


@dataclass(frozen=True)
class SyncOptions:
    """Options of the synchronisation of an operator's gradients.

    Attributes:
        buffers: "after_backward", or "manual" where the loop says when.
        averages: False if the losses are sums over their batches.
        ddp_args: for torch's DistributedDataParallel.
        shard: which modules are units, see `lockstep.sync.shard_units`; "whole": none.
        mp_policy: torch's `MixedPrecisionPolicy` for models in units; None for none.
        dp_shard_size: over how many ranks models in units are sharded; None for all.
        resume_step: steps of the run that have happened, where another generation of the group
            goes on: the ranks' values are equal already. None at the beginning: they become
            rank 0's.
    """

    buffers: str
    averages: bool
    ddp_args: Mapping[str, Any] = field(default_factory=dict)
    shard: ShardPolicy = "whole"
    mp_policy: MixedPrecisionPolicy | None = None
    dp_shard_size: int | None = None
    resume_step: int | None = None


@dataclass(frozen=True)
class TrainedParameters:
    """Which parameters a run trains.

    Attributes:
        requires_grad: the flag of each parameter, by name.
        groups: for each optimizer the names in each parameter group; "?" for a parameter of no
            registered module.
    """

    requires_grad: Mapping[str, bool]
    groups: Sequence[Sequence[Sequence[str]]]


@dataclass
class TrainingParts:
    """The registered objects of an operator, in lists, and the synchronisation of its gradients.

    Attributes:
        averages: of the models' weights, one for each model; empty without ``ema``.
        whole_models: copies of models that are in shards, from before, without memory for their
            tensors (on the meta device); empty unless models are.
        whole_places: where each module was in the models that were copied so.
        trained_after_setup: which parameters train when `setup` has ended; None before.
        buffers_after_setup: the shapes and dtypes of persistent buffers when `setup` has ended, for
            each of `lockstep.operator.buffer_values.labelled_modules`.
        hyperparameters_after_setup: those of optimizers and schedulers when `setup` has ended.
        has_warned_of_names: whether the user knows that no state loads into what `setup` makes.
        stepped_by_loop: schedulers and GradScalers among the operator's attributes, which a loop of
            the user's own steps. They are saved and undone as `schedulers` are.
        scheduler_records: what notes which steps schedulers have made, with the methods
            `state_dict` and `load_state_dict`. It is undone with them, and saved by whoever has
            added it: an integration.
    """

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    criterion: Any
    models_given_alone: bool
    sync: Synchroniser | None
    sync_options: SyncOptions
    attached: tuple[nn.Parameter, ...] = ()
    can_join: bool = False
    averages: list[AveragedModel] = field(default_factory=list)
    whole_models: list[nn.Module] = field(default_factory=list)
    whole_places: dict[nn.Module, tuple[int, str]] = field(default_factory=dict)
    trained_after_setup: TrainedParameters | None = None
    buffers_after_setup: dict[str, BufferKinds] = field(default_factory=dict)
    hyperparameters_after_setup: Hyperparameters = field(default_factory=list)
    has_warned_of_names: bool = False
    stepped_by_loop: list[Any] = field(default_factory=list)
    scheduler_records: list[Any] = field(default_factory=list)

    def leave_group(self) -> None:
        """Leave a group that has broken, so that another one can be joined."""
        self.can_join = self.sync is not None and self.sync.leave_group()

    def refuse_added_parameters(self) -> None:
        """Raise if a model holds parameters that it did not hold when it was registered.

        Such parameters were not made equal on all ranks, and their gradients are not reduced: each
        rank would compute with a model of its own.

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
        raise UnknownParameterError(
            "a registered model holds parameters that nobody synchronises",
            got=first_of(found, 5),
            cause="they were added or replaced after register(), as in model.fc = nn.Linear(...)",
            fix="build the model completely before register(); to start from trained weights,"
            " make a new trainer whose setup() loads them, or copy values in place:"
            " parameter.data.copy_(...)",
        )

    def plain_models(self) -> list[nn.Module]:
        """The models without a wrapper of the user's own, or of ``torch.compile``."""
        return [without_wrapper(model) for model in self.models]

    def plain_modules(self) -> list[nn.Module]:
        """`modules()` without wrappers."""
        return [without_wrapper(module) for module in self.modules()]

    def plain_criterion(self) -> Any:
        """The criterion without a wrapper."""
        is_module = isinstance(self.criterion, nn.Module)
        return without_wrapper(self.criterion) if is_module else self.criterion

    def replace_modules(self, modules: Sequence[nn.Module]) -> None:
        """Put wrappers of `modules()` in their place, in the same order."""
        self.models = list(modules[: len(self.models)])
        if len(modules) > len(self.models):
            self.criterion = modules[-1]

    def modules(self) -> list[nn.Module]:
        """The models, and the criterion where it is a module (it may hold parameters)."""
        extra = [self.criterion] if isinstance(self.criterion, nn.Module) else []
        return [*self.models, *extra]

    def parameters(self) -> Iterator[nn.Parameter]:
        # Each parameter once: clipping would count a parameter that modules share twice.
        yield from dict.fromkeys(p for module in self.modules() for p in module.parameters())

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """`parameters()` by their names, behind the position of the module among `modules()`."""
        names: dict[nn.Parameter, str] = {}
        for position, module in enumerate(self.plain_modules()):
            for name, parameter in module.named_parameters():
                names.setdefault(parameter, f"{position}.{name}")
        return {name: parameter for parameter, name in names.items()}

    def names_of_parameters(self) -> dict[int, str]:
        """The names that `named_parameters` has, by the parameter's ``id``."""
        return {id(parameter): name for name, parameter in self.named_parameters().items()}

    def trained_parameters(self) -> TrainedParameters:
        """Which parameters train as things stand."""
        named, names = self.named_parameters(), self.names_of_parameters()
        groups = [
            [[names.get(id(each), "?") for each in group["params"]] for group in groups]
            for groups in (optimizer.param_groups for optimizer in self.optimizers)
        ]
        flags = {name: parameter.requires_grad for name, parameter in named.items()}
        return TrainedParameters(flags, groups)

    def buffers(self) -> Iterator[torch.Tensor]:
        """All buffers, those included that are not persistent, which a checkpoint omits."""
        return (buffer for each in (*self.modules(), *self.averages) for buffer in each.buffers())

    @property
    def has_local_tensors(self) -> bool:
        """Whether each rank has weights or buffers of its own (`lockstep.local`)."""
        return any(True for module in self.modules() for _ in named_local_tensors(module))

    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers within the registered ones (SAM's) that have a state of their own."""
        return optimizers_with_state(self.optimizers)[len(self.optimizers) :]

    def shared_parameters(self) -> Iterator[nn.Parameter]:
        """`parameters()`, without those that `lockstep.local` leaves to each rank."""
        return (parameter for parameter in self.parameters() if not is_local(parameter))

    def saved_schedulers(self) -> list[Any]:
        """The `schedulers` that have a state: others are neither saved nor undone."""
        return [each for each in self.schedulers if has_state(each)]

    def set_training(self, training: bool) -> None:
        """Set the modes of the modules that optimizers train; for evaluation, those of all."""
        # The mode of a frozen teacher or of a loss network is the user's.
        trained = {id(each) for one in self.optimizers for each in optimizer_parameters(one)}
        for module in self.modules():
            if not training or any(id(each) in trained for each in module.parameters()):
                module.train(training)

    @contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """Inside, modules are in evaluation mode; afterwards each is in its former mode."""
        modes = [(each, each.training) for module in self.modules() for each in module.modules()]
        self.set_training(False)
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def has_state(scheduler: object) -> bool:
    """Whether the state of a scheduler can be taken and put back."""
    return hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")


def without_wrapper(model: nn.Module) -> nn.Module:
    """The module within wrappers (data parallelism's, ``torch.compile``'s), or `model` itself."""
    # A wrapper's names for the weights ("module.", "_orig_mod.") must not get into checkpoints.
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel | DataParallelModel):
            inner: nn.Module = model.module
        else:
            inner = compiled_from(model)
        if inner is model:
            return model
        model = inner
