# SPDX-License-Identifier: Apache-2.0
"""A `TrainingOperator` around a LightningModule.

Where Lightning gives `training_step` the batch of one device, this operator gives it one shard of
the global batch, with the shard's own random numbers: so the result does not depend on the number
of workers.

The operator overrides the methods of the default loop, and calls each of the module's hooks at the
moment at which Lightning calls it. The default loop computes the steps.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lockstep import reduction_context
from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.integrations.lightning import unsupported
from lockstep.integrations.lightning.batch_end_hook import BatchEndHook, Output
from lockstep.integrations.lightning.checkpoint_hooks import (
    adds_to_checkpoints,
    run_on_load_hooks,
    run_on_save_hooks,
)
from lockstep.integrations.lightning.epoch_end_hook import EpochEndHook
from lockstep.integrations.lightning.logging_capture import LoggingCapture
from lockstep.integrations.lightning.lr_schedulers import (
    SchedulerStepper,
    parse_configure_optimizers,
)
from lockstep.integrations.lightning.manual_optimization import (
    ManualStrategyView,
    of_manual_module,
    refuse_automatic_options,
)
from lockstep.integrations.lightning.module_factory import (
    ModuleFactory,
    check_module_argument,
    is_lightning,
    single_loader,
)
from lockstep.integrations.lightning.optimization_hooks import OptimizationHooks, call_data_hook
from lockstep.integrations.lightning.step_outputs import detach, loss_and_metrics, step_arguments
from lockstep.integrations.lightning.trainer_view import (
    TrainerView,
    hide_metrics,
    show_loaders,
    show_predicting,
    update_view,
)
from lockstep.keys import SCHEDULER_STEP_MANUAL
from lockstep.operator import TrainingOperator
from lockstep.operator.default_loops import backward_in_own_loop, is_computed_per_shard
from lockstep.operator.given_objects import GivenObjects
from lockstep.operator.loop_protocols import is_epoch_over, place_in_epoch
from lockstep.operator.registration import registered_parts
from lockstep.operator.shard_results import ShardResults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from lockstep.operator import Options


def from_lightning(
    base: type[TrainingOperator],
    module_cls: Any,
    train_dataloader: Any = None,
    val_dataloader: Any = None,
    *,
    datamodule: Any = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    max_epochs: int | None = None,
    **further: Any,
) -> type[TrainingOperator]:
    """An operator class that trains a LightningModule as it is.

    Its `training_step`, `validation_step`, `configure_optimizers`, hooks and loaders are
    used; `self.log` ends up in what `train()` and `validate()` return, as means over all
    samples of all workers; `trainer.get_model()` is the module. One `train()` is one of
    Lightning's epochs, and `validate()` the validation after it.

    Args:
        module_cls: a LightningModule class, made with the trainer's `config` (each key is a
            parameter, or all of it the parameter ``config``); a function from the config to a
            module; or a module, which holds the trained weights after each `train()`.
        train_dataloader, val_dataloader: loaders instead of the module's own.
        datamodule: a LightningDataModule, class or instance, or a function from the config.
        gradient_clip_val, gradient_clip_algorithm: "norm" (the default) or "value".
        max_epochs: for schedulers that ask ``self.trainer.max_epochs``, or for
            ``self.trainer.estimated_stepping_batches``.

    Raises:
        WrongTypeError: `module_cls` is none of these.
        NotAvailableError: Lightning is not installed. In the workers: the module uses a feature
            that lockstep does not support; the message names it.
    """
    unsupported.refuse_trainer_arguments(further)
    check_module_argument(module_cls)
    factory = ModuleFactory(
        module_cls,
        datamodule,
        train_dataloader,
        val_dataloader,
        gradient_clip_val,
        gradient_clip_algorithm,
        max_epochs,
    )
    members: dict[str, Any] = {"_factory": factory}
    if is_lightning(module_cls, "LightningModule") and not inspect.isclass(module_cls):
        members["_lockstep_given"] = GivenObjects(module_cls)
    bases: tuple[type[TrainingOperator], ...] = (base, LightningOperator)
    if base is TrainingOperator or issubclass(base, LightningOperator):
        bases = (LightningOperator if base is TrainingOperator else base,)
    elif base.setup is not TrainingOperator.setup:
        raise unsupported.setup_error(base.__name__)
    name = getattr(module_cls, "__name__", type(module_cls).__name__)
    return type(f"{name}Operator", bases, members)


class LightningOperator(TrainingOperator):
    """The base of the classes that `from_lightning` returns; subclass those to set `joint_loss`."""

    _factory: ClassVar[ModuleFactory]
    _is_manual: ClassVar[bool] = False

    @classmethod
    def _lockstep_overrides(cls, method: Callable[..., Any]) -> bool:
        # Methods of LightningOperator do not count as user overrides: like the default loop, they
        # run shard by shard. A training_step that steps optimizers itself is a user's own step.
        if method is TrainingOperator.train_batch and cls._is_manual:
            return True
        return getattr(cls, method.__name__) is not getattr(LightningOperator, method.__name__)

    def get_model(self) -> Any:
        """The LightningModule, as RaySGD's operator named it."""
        return self.module

    @classmethod
    def _lockstep_check(cls, options: Options) -> None:
        super()._lockstep_check(options)
        unsupported.check_settings(options, cls._factory.gradient_clip_val is not None)

    def setup(self, config: Any) -> None:
        context, factory = self._lockstep.context, self._factory
        copied = context.is_trial or self._lockstep_trains_copies
        module, datamodule = factory.make(config, copied=copied)
        unsupported.check_module(module, context.options)
        self.module, self.datamodule = module, datamodule
        self._view = TrainerView(self, factory, datamodule)
        update_view(self._view, lightning_module=module, model=module)
        module.trainer = self._view
        if datamodule is not None:
            datamodule.trainer = self._view
        self._logging = LoggingCapture(module, lambda: self._lockstep.context.group)
        self._hook_targets = [datamodule, module] if datamodule is not None else [module]
        self._prepare_data()
        for target in self._hook_targets:
            target.setup("fit")
        module.configure_model()
        module.to(context.device)
        self._open_loaders()
        returned, name = module.configure_optimizers(), type(module).__name__
        is_manual = not module.automatic_optimization
        if is_manual:
            self.__class__ = of_manual_module(type(self))
            refuse_automatic_options(context.options, factory.gradient_clip_val, name)
        optimizers, configs = parse_configure_optimizers(returned, name, is_manual=is_manual)
        # `SchedulerStepper` steps the schedulers, so the default loop must not.
        self._steps_schedulers = context.options.scheduler_step_freq is None and not is_manual
        manual = replace(context.options, scheduler_step_freq=SCHEDULER_STEP_MANUAL)
        self._lockstep.context = replace(context, options=manual)
        self._step_hooks = OptimizationHooks(module, self._logging, self._lockstep)
        self._lockstep.step_actions = self._step_hooks
        self.model, optimizers, *_ = self.register(
            models=module,
            optimizers=optimizers,
            schedulers=[each.scheduler for each in configs] or None,
        )
        self._scheduler_stepper = SchedulerStepper(configs, module.lr_scheduler_step)
        registered_parts(self).scheduler_records.append(self._scheduler_stepper)
        self.optimizer = optimizers[0] if len(optimizers) == 1 else optimizers
        update_view(self._view, optimizers=optimizers, lr_scheduler_configs=configs)
        self._manual: ManualStrategyView | None = None
        if is_manual:
            backward = partial(backward_in_own_loop, self)
            self._manual = ManualStrategyView(self._view, optimizers, backward)
            update_view(self._view, strategy=self._manual, precision_plugin=self._manual)
            self._lockstep.further_counts.append(self._manual)
        self._lockstep.further_counts.append(self._logging)
        self._has_fit_begun = self._epoch_is_over = False
        self._started_epoch = -1
        self._num_ended_epochs = 0
        self._validated: set[str] = set()  # the names that a validation has logged
        self._outputs: list[Output] = []
        self._batch_end_hook = BatchEndHook(self, module, self._logging)
        self._epoch_end_hook = EpochEndHook(self, module, self._logging)

    def _prepare_data(self) -> None:
        """Call `prepare_data`, which downloads, on one worker of each node; the others wait."""
        for target in self._hook_targets:
            if self.local_rank == 0:
                target.prepare_data()
        self._lockstep.context.group.exchange(None)

    def _open_loaders(self) -> None:
        train = self._factory.train_dataloader
        if train is None:
            train = self._loader_of("train_dataloader")
        validation = None
        if unsupported.overrides(self.module, "validation_step"):
            validation = self._factory.val_dataloader
            if validation is None:
                validation = self._loader_of("val_dataloader")
        train, validation = single_loader(train, "train"), single_loader(validation, "validation")
        self.register_data(train_loader=train, validation_loader=validation)
        show_loaders(self._view, train, validation)

    def _loader_of(self, hook: str) -> Any:
        for target in self._hook_targets:
            if unsupported.overrides(target, hook):
                return getattr(target, hook)()
        return None

    def to_device(self, batch: Any) -> Any:
        """Move `batch` by the transfer hooks of the datamodule or the module."""
        batch = call_data_hook(self._hook_targets, "on_before_batch_transfer", batch, 0)
        batch = call_data_hook(
            self._hook_targets, "transfer_batch_to_device", batch, self.device, 0
        )
        return call_data_hook(self._hook_targets, "on_after_batch_transfer", batch, 0)

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:
        module, epoch = self.module, int(info["epoch_idx"])
        update_view(self._view, current_epoch=epoch, training=True, validating=False)
        with self._logging.capturing("train"):
            self._begin_fit()
            if self._started_epoch != epoch:
                self._end_earlier_epochs(epoch)
                self._logging.begin_epoch()
                if self._steps_schedulers:
                    self._scheduler_stepper.use_metrics_within(epoch - 1)
                    self._scheduler_stepper.check_monitored(epoch)
                module.on_train_epoch_start()
                self._started_epoch = epoch
            metrics = super().train_epoch(iterator, info)
            self._batch_end_hook.share_writes()
            epoch_over = is_epoch_over(iterator)
            if epoch_over:
                self._step_epoch_schedulers(epoch)
                if self._epoch_end_hook.is_due(epoch):
                    logged = self._logging.values_so_far()
                    self._update_callback_metrics(logged, epoch_over=False)
                    with hide_metrics(self._view, self._validated - logged.keys()):
                        self._epoch_end_hook.call(epoch)
            logged, of_epoch = self._logging.end_pass(epoch_over=epoch_over)
        self._lockstep.names_over_call = frozenset(logged)
        self._epoch_is_over = epoch_over
        self._update_callback_metrics(of_epoch, epoch_over=epoch_over)
        return {**metrics, **logged}

    def _step_epoch_schedulers(self, epoch: int) -> None:
        """Step the schedulers at an epoch's end: once, although a failure may repeat the end."""
        if self._steps_schedulers and self._num_ended_epochs <= epoch:
            self._scheduler_stepper.after_epoch(epoch)
        self._num_ended_epochs = max(self._num_ended_epochs, epoch + 1)

    def _end_earlier_epochs(self, epoch: int) -> None:
        """End the epochs before `epoch` that have not ended yet.

        A stream shows only to the next call that an epoch was over, and a checkpoint may hold the
        last step of an epoch and not its end. Without communication: a failure in between leaves
        some ranks with the epoch ended and others not. A process that has not trained the epoch
        calls no hook, which would miss what `training_step` has collected, and has no metrics.
        """
        behind = self._lockstep.writes_behind_steps
        for ended in range(min(self._num_ended_epochs, behind.ended_epochs), epoch):
            update_view(self._view, current_epoch=ended)
            has_missed = self._started_epoch != ended and self._num_ended_epochs <= ended
            self._step_epoch_schedulers(ended)
            if self._started_epoch == ended and self._epoch_end_hook.is_due(ended):
                self._epoch_end_hook.call(ended)
            elif has_missed and self._steps_schedulers:
                self._scheduler_stepper.miss_metrics(ended)
        behind.ended_epochs = max(behind.ended_epochs, epoch)
        update_view(self._view, current_epoch=epoch)

    def _begin_fit(self) -> None:
        if not self._has_fit_begun:
            self.module.on_fit_start()
            self.module.on_train_start()
        self._has_fit_begun = True

    def _update_callback_metrics(self, metrics: Mapping[str, float], *, epoch_over: bool) -> None:
        """Store an epoch's or a validation's metrics, equal on all workers; step the plateaus."""
        known = {name: torch.tensor(value) for name, value in metrics.items()}
        update_view(self._view, callback_metrics={**self._view.callback_metrics, **known})
        # A validation before the first step is none after an epoch.
        if epoch_over and self._steps_schedulers and self._view.global_step:
            epoch = self._view.current_epoch
            # A stream's end is known to the training pass that comes to it, and not counted yet.
            is_behind = self._view.training or self._lockstep.epochs_finished() > epoch
            self._scheduler_stepper.after_metrics(epoch, metrics, epoch_over=is_behind)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        index = batch_info["batch_idx"]
        self._outputs = []
        self._logging.step = self.global_step
        state = self._lockstep
        shards = [] if state.counts_nothing else state.global_batch.shards_in(batch)
        own_samples = sum(shard.num_samples for shard in shards)
        with self._logging.counting_for(own_samples, first_time=False):
            if self._manual is None:
                metrics = self._train_automatically(batch, batch_info, index)
            else:
                metrics = self._train_manually(batch, index)
            self._batch_end_hook.call(self._outputs, index)
        self._outputs = []
        return metrics

    def _train_automatically(
        self, batch: Any, batch_info: dict[str, Any], index: int
    ) -> dict[str, Any]:
        self._step_hooks.begin(
            index, has_batches=bool(self._lockstep.global_batch.shards_in(batch))
        )
        metrics = super().train_batch(batch, batch_info)
        if self._lockstep.global_batch.closes_window:
            update_view(self._view, global_step=self._view.global_step + 1)
            if self._steps_schedulers:
                self._scheduler_stepper.after_step(index)
        return metrics

    def _train_manually(self, batch: Any, index: int) -> dict[str, Any]:
        """Give all samples of this worker to a training_step that steps its optimizers."""
        state = self._lockstep
        (joint_batch,) = state.global_batch.shards_in(batch)
        num_samples = 0 if state.counts_nothing else joint_batch.num_samples
        batch = self.to_device(batch)
        with self.timers.record("fwd"), state.precision.autocast(keeps_casts=False):
            output = self._run_training_step(batch, index, num_samples)
        loss, metrics = loss_and_metrics(self.module, "training_step", output)
        self._outputs.append((detach(output), batch, num_samples))
        return metrics if loss is None else {"train_loss": detach(loss), **metrics}

    def _run_training_step(self, batch: Any, index: int, num_samples: float) -> Any:
        module = self.module
        with self._logging.counting_for(num_samples, first_time=True):
            if module.on_train_batch_start(batch, index) == -1:
                raise NotAvailableError(
                    "on_train_batch_start returned -1: the rest of an epoch cannot be skipped",
                    where=type(module).__name__,
                    fix="trainer.train(num_steps=...) trains on a part of the data",
                )
            return module.training_step(*step_arguments(module.training_step, batch, index))

    def compute_loss(self, batch: Any, batch_info: Mapping[str, Any]) -> Any:
        if self._manual is not None:  # asked to explain a NaN
            raise NotAvailableError("a training_step that steps its optimizers has no loss alone")
        module, index = self.module, batch_info["batch_idx"]
        num_samples = 0 if self._lockstep.counts_nothing else _current_num_samples()
        self._step_hooks.shard_samples = num_samples
        with self._logging.discarding_outside_passes():
            output = self._run_training_step(batch, index, num_samples)
        loss, metrics = loss_and_metrics(module, "training_step", output)
        if loss is None:
            raise NotAvailableError(
                "training_step returned no loss: a batch cannot be left out",
                where=type(module).__name__,
                cause="the workers reduce their gradients together",
                fix="return the loss times zero, as in (prediction * 0).sum()",
            )
        self._outputs.append((detach(output), batch, num_samples))
        self._step_hooks.clear_once()
        return loss, metrics

    def _lockstep_surrounds_validation(self) -> bool:
        hooks = map(partial(unsupported.overrides, self.module), unsupported.AROUND_VALIDATION)
        return any(hooks) or super()._lockstep_surrounds_validation()

    def _lockstep_changes_in_validation(self) -> bool:
        steps = self._steps_schedulers and self._scheduler_stepper.has_plateaus
        changes = steps or adds_to_checkpoints(self._hook_targets)
        return changes or super()._lockstep_changes_in_validation()

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:
        module = self.module
        update_view(self._view, training=False, validating=True)
        capturing = self._logging.capturing("validation")
        with torch.no_grad(), registered_parts(self).in_evaluation(), capturing:
            if place_in_epoch(val_iterator) == 0:
                self._logging.begin_epoch()
                module.on_validation_start()
                module.on_validation_epoch_start()
            metrics = super().validate(val_iterator, info)
            epoch_over = is_epoch_over(val_iterator)
            if epoch_over:
                if unsupported.overrides(module, "on_validation_epoch_end"):
                    self._update_callback_metrics(self._logging.values_so_far(), epoch_over=False)
                    module.on_validation_epoch_end()
                module.on_validation_end()
            logged, of_epoch = self._logging.end_pass(epoch_over=epoch_over)
        self._lockstep.names_over_call = frozenset(logged)
        self._validated |= of_epoch.keys()
        update_view(self._view, validating=False)
        self._update_callback_metrics(of_epoch, epoch_over=epoch_over)
        return {**metrics, **logged}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        state, index = self._lockstep, batch_info["batch_idx"]
        self._logging.step = index
        per_shard = is_computed_per_shard(self, batch)
        results = ShardResults(self, "validation")
        for shard in state.global_batch.shards_in(batch):
            state.evaluation_writes.take_back()
            with (
                self.timers.record("eval_fwd"),
                state.precision.autocast(),
                state.global_batch.activate_shard(shard, per_shard=per_shard),
                self._logging.counting_for(shard.num_samples, first_time=True),
            ):
                metrics = self._run_validation_step(self.to_device(shard.batch), index)
            results.add(shard, metrics, results.weight_of(shard, metrics))
        return results.metrics()

    def _run_validation_step(self, batch: Any, index: int) -> dict[str, Any]:
        module = self.module
        module.on_validation_batch_start(batch, index)
        output = module.validation_step(*step_arguments(module.validation_step, batch, index))
        module.on_validation_batch_end(output, batch, index)
        return {} if output is None else loss_and_metrics(module, "validation_step", output)[1]

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        """Call the module's `predict_step`; without one, its `forward` with the features."""
        module = self.module
        unsupported.check_prediction(module)
        if not unsupported.overrides(module, "predict_step"):
            return super().predict_batch(batch, batch_info)
        return module.predict_step(
            *step_arguments(module.predict_step, batch, batch_info["batch_idx"])
        )

    def _lockstep_predicting(self) -> AbstractContextManager[None]:
        return show_predicting(self._view)

    def state_dict(self) -> Any:
        return {
            "steps": self._view.global_step,
            "epoch": self._view.current_epoch,
            "ended_epochs": self._num_ended_epochs,
            "ended_by_hook": self._lockstep.writes_behind_steps.ended_epochs,
            "plateaus": self._scheduler_stepper.state_dict(),
            "checkpoint": run_on_save_hooks(self._view, self._hook_targets),
            "datamodule": None if self.datamodule is None else self.datamodule.state_dict(),
        }

    def load_state_dict(self, state: Any) -> None:
        goes_back = state["steps"] < self._view.global_step
        update_view(self._view, current_epoch=state["epoch"], global_step=state["steps"])
        # Earlier versions counted none: what they had not ended stays so.
        self._num_ended_epochs = state.get("ended_epochs", state["epoch"])
        behind = self._lockstep.writes_behind_steps
        behind.ended_epochs = state.get("ended_by_hook", self._num_ended_epochs)
        self._scheduler_stepper.load_state_dict(state["plateaus"])
        if goes_back:  # a worker that is a step behind the others goes on with its epoch
            self._started_epoch = -1
        if state.get("datamodule"):
            self.datamodule.load_state_dict(state["datamodule"])
        run_on_load_hooks(self._view, self._hook_targets, state["checkpoint"])

    def _lockstep_end(self) -> None:
        """Call the hooks that Lightning calls after the last epoch, when the trainer shuts down."""
        if self._has_fit_begun:
            update_view(self._view, current_epoch=self._view.current_epoch + self._epoch_is_over)
            self.module.on_train_end()
            self.module.on_fit_end()
        for target in self._hook_targets:
            target.teardown("fit")
        self.module.trainer = None
        # In the driver's process another trainer may have been made with it since.
        if self.datamodule is not None and self.datamodule.trainer is self._view:
            self.datamodule.trainer = None


def _current_num_samples() -> float:
    """The number of samples of the shard whose loss is being computed."""
    active = reduction_context.active()
    if active is None or active.weight is None:
        raise ConfigurationError(
            "a training_step runs outside of a trainer's step",
            fix="call trainer.train()",
        )
    return active.weight
