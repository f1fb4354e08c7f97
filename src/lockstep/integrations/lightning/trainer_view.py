# SPDX-License-Identifier: Apache-2.0
"""`self.trainer` inside a LightningModule: a read-only view of the run."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.data.global_batches import global_batches_of, length_or_none
from lockstep.errors import NotAvailableError
from lockstep.sync import is_local
from lockstep.sync.optimizer_inspection import optimizer_parameters

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from lockstep.integrations.lightning.module_factory import ModuleFactory
    from lockstep.operator import TrainingOperator
    from lockstep.operator.rank_context import RankContext

_CONSTANTS: Final[dict[str, Any]] = {
    "logger": None,
    "loggers": [],
    "callbacks": [],
    "checkpoint_callback": None,
    "early_stopping_callback": None,
    "progress_bar_callback": None,
    "log_dir": None,
    "barebones": False,
    "fast_dev_run": False,
    "sanity_checking": False,
    "testing": False,
    "should_stop": False,
    "max_steps": -1,
    "num_nodes": 1,
    "enable_validation": True,
}
"""The attributes of a Lightning trainer that was given no loggers and no callbacks."""

_PRECISIONS: Final = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class NoSuchTrainerAttributeError(NotAvailableError, AttributeError):
    """A module read an attribute of its trainer that only Lightning's own trainer has."""


class TrainerView:
    """Read-only attributes of Lightning's trainer; any other one raises an error with its name."""

    _operator: TrainingOperator
    global_step: int
    callback_metrics: dict[str, Any]
    optimizers: list[torch.optim.Optimizer]
    num_training_batches: float
    max_epochs: int
    accumulate_grad_batches: int

    def __init__(self, operator: TrainingOperator, factory: ModuleFactory, datamodule: Any) -> None:
        options = operator._lockstep.context.options
        clip_value, plugin = factory.gradient_clip_val, StrategyView(self)
        vars(self).update(
            _CONSTANTS,
            _operator=operator,
            datamodule=datamodule,
            lightning_module=None,
            model=None,
            current_epoch=0,
            global_step=0,
            training=False,
            validating=False,
            predicting=False,
            callback_metrics={},
            num_training_batches=math.inf,
            num_val_batches=[],
            train_dataloader=None,
            val_dataloaders=None,
            optimizers=[],
            lr_scheduler_configs=[],
            precision=_PRECISIONS[options.precision],
            accumulate_grad_batches=options.accumulate,
            gradient_clip_val=options.clip_grad_norm if clip_value is None else clip_value,
            gradient_clip_algorithm=factory.gradient_clip_algorithm,
            strategy=plugin,
            precision_plugin=plugin,
        )
        if factory.max_epochs is not None:
            vars(self)["max_epochs"] = factory.max_epochs

    def __setattr__(self, name: str, value: Any) -> None:
        raise NotAvailableError(
            f"self.trainer.{name} cannot be set: the loop is lockstep's",
            got=f"self.trainer.{name} = {value!r:.60}",
            fix="end the loop around trainer.train() from what it returns"
            if name == "should_stop"
            else f"set the TorchTrainer argument that {name} stands for",
        )

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` look up dunder names, and expect an AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("max_epochs", "estimated_stepping_batches"):
            raise NoSuchTrainerAttributeError(
                f"self.trainer.{name} is not there: nobody said how long the run will be",
                fix="TrainingOperator.from_lightning(MyModule, max_epochs=...)",
            )
        raise NoSuchTrainerAttributeError(
            f"self.trainer.{name} is not there: a lockstep trainer runs this module",
            fix="write what you need it for in the program around trainer.train(), or read"
            " one of: " + ", ".join(sorted(n for n in vars(self) if not n.startswith("_"))),
        )

    @property
    def world_size(self) -> int:
        return self._operator._lockstep.context.world_size

    num_devices = world_size

    @property
    def global_rank(self) -> int:
        return self._operator.world_rank

    @property
    def local_rank(self) -> int:
        return self._operator.local_rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return dict(self.callback_metrics)

    progress_bar_metrics = logged_metrics

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole run, for schedulers that need to know their end."""
        epochs = self.max_epochs  # where it is not there, `__getattr__` is asked for this one, too
        if self.num_training_batches == math.inf:
            return math.inf
        in_epoch = math.ceil(self.num_training_batches / self.accumulate_grad_batches)
        return in_epoch * epochs


def update_view(view: TrainerView, **values: Any) -> None:
    """Set attributes that change during the run; only the operator calls this function.

    Rejected: a method of the view, which a module could find where Lightning's trainer has none.
    """
    vars(view).update(values)


@contextmanager
def show_predicting(view: TrainerView) -> Iterator[None]:
    """Inside, `view` shows a prediction, whatever the run did before and does next.

    A module's transfer hooks ask it whether they are to augment the batch.
    """
    names = ("training", "validating", "predicting")
    before = {name: getattr(view, name) for name in names}
    update_view(view, training=False, validating=False, predicting=True)
    try:
        yield
    finally:
        update_view(view, **before)


class _EpochMetrics(dict[str, Any]):
    """An epoch's metrics, before the validation behind the epoch.

    Args:
        known: the metrics.
        awaited: the names of those that the validation will log.
    """

    def __init__(self, known: Mapping[str, Any], awaited: Collection[str]) -> None:
        super().__init__(known)
        self._awaited = frozenset(awaited)

    def __missing__(self, name: str) -> Any:
        if name in self._awaited:
            raise KeyError(
                f"{name!r}: trainer.validate() comes after trainer.train(), and so after"
                " on_train_epoch_end; read it in on_validation_epoch_end, or in what"
                " trainer.validate() returns"
            )
        raise KeyError(name)


@contextmanager
def hide_metrics(view: TrainerView, names: Collection[str]) -> Iterator[None]:
    """Inside, `view` has no metrics of these names: those that it has are of an earlier epoch.

    In Lightning the epoch's validation has run before the hook that is called inside. To read the
    last one's numbers as this one's would be a fault that nobody sees.
    """
    before = view.callback_metrics
    hidden = {name: value for name, value in before.items() if name in names}
    known = {name: value for name, value in before.items() if name not in names}
    update_view(view, callback_metrics=_EpochMetrics(known, names))
    try:
        yield
    finally:
        update_view(view, callback_metrics={**hidden, **view.callback_metrics})


class LoaderView:
    """A loader as the module sees it: its length is the number of global batches in an epoch."""

    def __init__(self, loader: Any, num_batches: int | None) -> None:
        self._loader, self._num_batches = loader, num_batches

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


def show_loaders(view: TrainerView, train: Any, validation: Any) -> None:
    """Show a run's loaders, of which either may be None, and how many batches an epoch has.

    Collective:
        Every rank, where each reads a loader of its own: one small exchange.
    """
    lengths = _num_batches(view._operator._lockstep.context, (train, validation))
    known = [math.inf if each is None else each for each in lengths]
    update_view(
        view,
        train_dataloader=None if train is None else LoaderView(train, lengths[0]),
        val_dataloaders=None if validation is None else LoaderView(validation, lengths[1]),
        num_training_batches=known[0] if train is not None else 0,
        num_val_batches=[known[1]] if validation is not None else [],
    )


def _num_batches(context: RankContext, loaders: Sequence[Any]) -> list[int | None]:
    """The steps of an epoch over each of `loaders`; None without a loader, or if nobody knows."""
    if context.options.add_dist_sampler:
        num_shards = context.shard_assignment.num_shards
        return [
            None if each is None else global_batches_of(each, num_shards).num_steps()
            for each in loaders
        ]
    # As `UserShardedLoader.agree` does it: the worker with the most batches decides.
    by_rank = context.group.exchange([length_or_none(each) for each in loaders])
    return [None if None in lengths else max(lengths) for lengths in zip(*by_rank, strict=True)]


class StrategyView:
    """The methods of Lightning's strategy and precision plugin that a LightningModule calls."""

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    @property
    def _lightning_optimizers(self) -> list[torch.optim.Optimizer]:
        # `LightningModule.optimizers()` returns this list.
        return list(self._trainer.optimizers)

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """Clip the global gradients, for `LightningModule.clip_gradients(...)`."""
        if clip_val <= 0:  # Lightning's way to say: not at all
            return
        # A norm with local gradients in it differs between ranks, and so would the shared weights.
        parameters = [held for held in optimizer_parameters(optimizer) if not is_local(held)]
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            torch.nn.utils.clip_grad_value_(parameters, clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoSuchTrainerAttributeError(
            f"self.trainer.strategy.{name} is not there: a lockstep trainer runs this module",
            fix="for a gather with gradients: lockstep.gather, and joint_loss = True in a subclass"
            " of the operator that from_lightning returned",
        )
