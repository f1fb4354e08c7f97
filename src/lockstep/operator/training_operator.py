# SPDX-License-Identifier: Apache-2.0
"""`TrainingOperator`: what the user writes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lockstep.errors import ConfigurationError, NotOverriddenError
from lockstep.metrics import TimerCollection
from lockstep.operator import default_forward, default_loops, operator_factories
from lockstep.operator.operator_state import OperatorState
from lockstep.operator.rank_context import RankContext
from lockstep.operator.registration import (
    DEFAULT_MEAN,
    as_sequence,
    build_training_parts,
    in_given_containers,
    refuse_unknown_arguments,
    require_single_loader,
)
from lockstep.operator.sync_setup import check_own_wrapper
from lockstep.operator.training_parts import SyncOptions
from lockstep.tensor_tree import children_of, rebuild_container

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from lockstep.operator.given_objects import GivenObjects
    from lockstep.operator.rank_context import Options


class TrainingOperator:
    """The user's definition of a training run; one instance lives in every worker.

    Override `setup`, and usually no more than `compute_loss`::

        class Digits(TrainingOperator):
            def setup(self, config):
                model = nn.Linear(64, 10)
                self.model, self.optimizer, self.criterion = self.register(
                    models=model,
                    optimizers=torch.optim.SGD(model.parameters(), lr=config["lr"]),
                    criterion=nn.CrossEntropyLoss())
                self.register_data(train_loader=..., validation_loader=...)

    With several models or optimizers, or a step of your own, override `train_batch`; with a
    loop of your own, `train_epoch`. There is no need to override both.

    Attributes:
        joint_loss: the loss communicates between workers (gathers, batch statistics), so all
            the shards of a worker go through as one batch.
        loss_reduction: "mean" if the loss is a mean over the batch; "sum" if it is a sum, and
            the objective is the sum over the global batch: gradients are added, not averaged.
            The default loops then report the sum divided by the samples, which does not
            depend on how a batch was cut.
        global_step: global batches committed since the run began; with `accumulate` an optimizer
            step uses several.
        timers: a `TimerCollection`, recording while `profile=True`.
    """

    joint_loss: ClassVar[bool] = False
    loss_reduction: str = "mean"

    # Private names begin with `_lockstep`, so that no user's class overrides one by chance.
    #
    # The user's own objects, which get the trained state in the driver's process; only of classes
    # made from instances.
    _lockstep_given: ClassVar[GivenObjects | None] = None
    # Whether `setup` copies the user's own objects, and leaves them to the run that trains them.
    _lockstep_trains_copies: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], context: RankContext | None = None) -> None:
        self._lockstep = OperatorState(config, context or RankContext())
        self.timers = TimerCollection()
        self.timers.disable()
        self.global_step = 0

    # ---------------------------------------------------------------- what the user overrides

    def setup(self, config: Any) -> None:
        """Make models, optimizers and data; call `self.register` and `self.register_data`.

        Args:
            config: the trainer's `config`. `config[BATCH_SIZE]`, if it is there, is this
                shard's share of the global batch: an `int` that remembers the whole.
        """
        raise _no_setup(type(self))

    def compute_loss(self, batch: Any, batch_info: Mapping[str, Any]) -> Any:
        """The loss of one batch, which is already on the device.

        By default the batch is ``(*features, target)`` and the loss is
        ``self.criterion(self.model(*features), target)``.

        It runs once for each shard, and not at all on a worker whose shards are empty. Weights and
        settings of optimizers (``group["lr"] = ...``) that it writes are equal on all workers all
        the same; attributes of the operator (``self.it += 1``) are each worker's own, so let what
        depends on the step follow from `global_step`.

        Returns:
            A scalar tensor, the mean over the batch's samples (their sum with
            ``loss_reduction = "sum"``); or that and a dict of metrics. If the loss is a mean
            over something else, ``metrics[lockstep.keys.WEIGHT]`` says over how much (a number
            of tokens, 0 if there is none): the objective, and every metric returned here, is
            then the mean over the tokens of the global batch.
        """
        return default_forward.default_loss(self, batch)[0]

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:
        """Train on every batch of `iterator`; returns metrics, weighted by samples.

        Puts the modules that hold an optimizer's parameters into training mode, and no others.

        Override for a loop of your own. `info` is the dict given to `trainer.train`, with
        `NUM_STEPS`, `USE_FP16`, `SCHEDULER_STEP` and ``"epoch_idx"`` (from 0) added. Leave out of
        what it counts batches for which `is_borrowed_batch` is true. The first read of an epoch
        waits for all workers: let every worker reach it before collectives of your own.
        """
        return default_loops.train_epoch(self, iterator, info)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """One optimizer step on one global batch; returns its metrics.

        An override gets all the samples of its worker as one batch, as the loader collated
        it; ``loss.backward()`` in it carries exactly the weight of that batch. Return
        ``num_samples`` if the metrics are means over something else than its samples, or,
        where that number should stay what it is, `lockstep.keys.WEIGHT`.

        A batch that an override makes for ``super().train_batch`` counts for all of those samples,
        until every tensor or list of samples in it shows that there are fewer. The same is true
        of `validate_batch`.

        Args:
            batch: one item of the loader.
            batch_info: `info` with ``"batch_idx"``, the batch's number in its epoch (from 0,
                whichever call of `trainer.train` comes to it), and ``"global_step"``.
        """
        return default_loops.train_batch(self, batch, batch_info)

    def after_step(self) -> None:
        """Called after each step that a registered optimizer took, in any loop; does nothing.

        For what belongs to a step: clamped or normalised weights, a momentum encoder. It runs
        without gradients, and draws the same random numbers on every worker; `global_step` counts
        this step only when its batch is over. It is not called for steps that a GradScaler
        left out.
        """

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate every batch without gradients; returns metrics, weighted by samples.

        Modules are in evaluation mode meanwhile; modes, and what forwards write, go back.
        """
        return default_loops.validate(self, val_iterator, info)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """The metrics of one batch: `val_loss`, and for class targets `val_accuracy`, a mean over
        those that the criterion does not ignore."""
        return default_loops.validate_batch(self, batch, batch_info)

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        """The outputs for one batch, without gradients; what `trainer.predict` collects.

        By default ``self.model(*features)`` of a batch ``(*features, target)``, ``(feature,)``
        or a lone tensor.

        Args:
            batch: one item of the loader, on the device.
            batch_info: ``"batch_idx"``.

        Returns:
            Tensors or arrays with one row per sample, lists with one entry per sample, or
            tuples, dicts and dataclasses of them; the user gets each sample's part of it.
        """
        return default_forward.default_prediction(self, batch)

    def state_dict(self) -> Any:
        """Further state to save: tensors and plain Python. Models are saved without it.

        Where `load_state_dict` takes it back, it is copied before each step, to undo one.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take back what `state_dict` gave; on each worker by itself, without communicating."""

    # ------------------------------------------------------------------- what the user calls

    def register(
        self,
        *,
        models: Any,
        optimizers: Any,
        criterion: Any = None,
        schedulers: Any = None,
        ema: Any = None,
        ddp_args: dict[str, Any] | None = None,
        shard: Any = "whole",
        mp_policy: Any = None,
        dp_shard_size: int | None = None,
        loss_reduction: str = DEFAULT_MEAN,
        **further: Any,
    ) -> tuple[Any, ...]:
        """Hand over models, optimizers, criterion and schedulers; call it once, in `setup`.

        Models and criterion move to this worker's device. Parameters, the criterion's
        included, are synchronised between workers through hooks on themselves: the models
        are returned as they are, not wrapped, and may be called in any way. Under
        ``sync="ddp"`` and ``"fsdp"`` use what is returned, and call the models themselves; under
        ``"data_parallel"`` too: what is returned shares its batch out over devices. Under
        ``"parameter_server"`` the optimizers' ``step`` and ``state_dict`` become the server's;
        their ``param_groups`` stay.

        Args:
            models: an `nn.Module`, or a list, tuple or ``dict.values()`` of them.
            optimizers: one optimizer, or several in the same ways.
            criterion: a loss, or any callable; a module may hold parameters.
            schedulers: one learning-rate scheduler, or several; needs the trainer's
                `scheduler_step_freq`. One that is only put into ``self.scheduler`` steps, too.
            ema: an average of each model's weights: a decay (True: 0.999), torch `AveragedModel`s,
                or a function from a model to one. Updated once after each global batch in which an
                optimizer stepped; in eval mode; ``trainer.get_averaged_model()`` is a copy.
            ddp_args: for torch's `DistributedDataParallel`; only with ``sync="ddp"``.
            shard: for ``sync="fsdp"``: the submodules that are gathered before their forward and
                freed after it: "auto" (the repeated members of a ``ModuleList``, ``ModuleDict`` or
                ``Sequential``), a list of module classes, or a function that says it of a module.
                Parameters become torch's `DTensor`. "whole": weights stay whole on every rank.
            mp_policy: torch's `MixedPrecisionPolicy`, for models in units.
            dp_shard_size: over how many workers a model in units is sharded, by default all; it
                divides `num_workers`; each further group of workers holds a replica (torch's HSDP).
            loss_reduction: "mean" or "sum"; if it is left out, the class's `loss_reduction`.

        Returns:
            ``(models, optimizers[, criterion][, schedulers][, averages])``, each in the shape
            given (alone, in a tuple, else in a list), the averages in that of the models.

        Gradient:
            From now on the gradient of every parameter is that of the global batch.

        Collective:
            Compares the models' structure between workers and broadcasts rank 0's weights.

        Raises:
            WrongTypeError: something is not a module, an optimizer, or cannot step.
            ConfigurationError: registered twice, schedulers without `scheduler_step_freq`.
            UnknownParameterError: an optimizer holds a parameter of no registered module.
            ReplicasDifferError: the workers built different models, optimizers or schedulers.
        """
        if self._lockstep.registered is not None:
            raise ConfigurationError(
                "register was called twice",
                fix="call it once, with lists: self.register(models=[a, b], optimizers=[...])",
            )
        refuse_unknown_arguments(further)
        models, optimizers, schedulers = map(as_sequence, (models, optimizers, schedulers))
        if loss_reduction is not DEFAULT_MEAN:
            self.loss_reduction = loss_reduction
        self._lockstep.registered = build_training_parts(
            self._lockstep.context,
            models=models,
            optimizers=optimizers,
            criterion=criterion,
            schedulers=schedulers,
            has_own_epoch=self._lockstep_overrides(TrainingOperator.train_epoch),
            ema=ema,
            sync_options=self._lockstep_sync_options(ddp_args, shard, mp_policy, dp_shard_size),
        )
        return in_given_containers(self._lockstep.registered, models, optimizers, schedulers)

    def _lockstep_sync_options(
        self, ddp_args: dict[str, Any] | None, shard: Any, mp_policy: Any, dp_shard_size: int | None
    ) -> SyncOptions:
        if self.loss_reduction not in ("mean", "sum"):
            raise ConfigurationError(
                "unknown loss_reduction", expected='"mean" or "sum"', got=repr(self.loss_reduction)
            )
        return SyncOptions(
            # The default step knows when a step's last forward is over, and that a shard starts
            # from the committed buffers; elsewhere backward's end is the moment.
            buffers="after_backward" if self._lockstep_overrides_loop() else "manual",
            averages=self.loss_reduction == "mean",
            ddp_args=dict(ddp_args or {}),
            shard=shard,
            mp_policy=mp_policy,
            dp_shard_size=dp_shard_size,
        )

    def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None:
        """Hand over the loaders, in `setup`; each is kept, and read in exact, disjoint parts.

        Where a dataset grows between two calls, an open epoch ends with what it began with.

        Raises:
            WrongTypeError: something is no loader.
            ConfigurationError: `setup` is over.
        """
        if self._lockstep.is_set_up:
            raise ConfigurationError(
                "register_data was called after setup",
                cause="this worker reads the loaders of setup, and so do those that join it later",
                fix="change what the dataset holds between two calls (its size, its transform); or"
                " trainer.save(path), and a new TorchTrainer that loads it",
            )
        self._lockstep.loaders = {
            "train": require_single_loader("train", train_loader),
            "validation": require_single_loader("validation", validation_loader),
        }

    def register_metrics(self, *, train: Any = None, validation: Any = None) -> None:
        """Hand over torchmetrics objects; results hold ``train_<name>`` and ``val_<name>``.

        ::

            self.register_metrics(validation={"f1": MulticlassF1Score(num_classes=10)})

        The default `compute_loss` and `validate_batch` call ``metric.update(output, target)``;
        methods of your own call it themselves. Each call of `train` or `validate` starts from
        nothing, so the same object may be given twice. At its end the workers' states are
        merged: every sample counts once, on whichever worker it was.

        Args:
            train: a metric, a ``MetricCollection``, or a dict from names to such.
            validation: the same.

        Collective:
            None: the driver merges. Nor does ``metric.compute()`` in a worker communicate: it is
            over that worker's samples.

        Raises:
            WrongTypeError: something is no torchmetrics object.
        """
        for purpose, given in (("train", train), ("validation", validation)):
            if given is not None:
                self._lockstep.registered_metrics.register(
                    purpose, given, self.device, lambda: self._lockstep.counts_nothing
                )

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Backpropagate `loss`, the mean over `weight` samples (or tokens, or any count).

        With ``loss_reduction="sum"`` it is their sum, which needs no weight and takes none.

        Args:
            loss: scalar.
            weight: how much this loss counts against the other workers' losses; the number
                of samples delivered if None, once for each batch of a window.

        Gradient:
            After the last backward of the step (see `no_sync`): the sum of weight times
            gradient over all workers, divided by the sum of the weights; or the plain sum.

        Collective:
            Every worker calls it equally often, unless under `no_sync`.
        """
        default_loops.backward_in_own_loop(self, loss, weight)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Accumulate gradients locally; weights add up until the next backward outside."""
        return nullcontext() if self._lockstep.sync is None else self._lockstep.sync.no_sync()

    def to_device(self, batch: Any) -> Any:
        """The same batch, of any nesting, with its tensors on this worker's device."""
        return _move_to_device(batch, self.device)

    # -------------------------------------------------------------------------- where it is

    @property
    def device(self) -> torch.device:
        return self._lockstep.context.device

    @property
    def device_ids(self) -> list[int] | None:
        """``[index]`` for a wrapper of your own; None on the CPU."""
        return None if self.device.type == "cpu" else [self.device.index or 0]

    @property
    def config(self) -> Any:
        return self._lockstep.config

    @property
    def world_rank(self) -> int:
        return self._lockstep.context.world_rank

    @property
    def local_rank(self) -> int:
        """This worker's rank among the workers of its node."""
        return self._lockstep.context.local_rank

    @property
    def is_borrowed_batch(self) -> bool:
        """Whether a loop of one's own counts nothing of the batch that its iterator gave last.

        A worker without samples in a step computes on samples of another worker, so that all run
        the same collectives. lockstep gives that batch no weight in the gradient and in the
        metrics of its own loops; sums, queues and lists of a `train_epoch` are for it to keep
        clean. A loop that reads ahead gets the answer for the batch that it has read last, not for
        the one that it computes: it keeps each answer beside its batch.
        """
        return self._lockstep.global_batch.is_borrowed

    @property
    def use_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def use_fp16(self) -> bool:
        return self._lockstep.precision.name == "fp16"

    @property
    def use_tqdm(self) -> bool:
        return self._lockstep.context.options.use_tqdm

    @property
    def scheduler_step_freq(self) -> str | None:
        return self._lockstep.context.options.scheduler_step_freq

    @classmethod
    def _lockstep_overrides(cls, method: Callable[..., Any]) -> bool:
        """Whether the user's class overrides `method`, a method of `TrainingOperator`."""
        return getattr(cls, method.__name__) is not getattr(TrainingOperator, method.__name__)

    @classmethod
    def _lockstep_overrides_loop(cls) -> bool:
        """Whether the user's `train_batch` or `train_epoch` decides when a step begins and ends."""
        loops = (TrainingOperator.train_batch, TrainingOperator.train_epoch)
        return any(cls._lockstep_overrides(loop) for loop in loops)

    def _lockstep_surrounds_validation(self) -> bool:
        """Whether the user's code runs around a whole validation, and may swap weights there."""
        return self._lockstep_overrides(TrainingOperator.validate)

    def _lockstep_changes_in_validation(self) -> bool:
        """Whether a validation may change what a checkpoint holds.

        The default `validate` takes back what a batch writes to the models: a `validate_batch` of
        the user's own changes the user's own state at most.
        """
        own = self._lockstep_overrides
        changes_state = own(TrainingOperator.validate_batch) and own(TrainingOperator.state_dict)
        return changes_state or self._lockstep_surrounds_validation()

    def _lockstep_predicting(self) -> AbstractContextManager[Any]:
        """Entered around all that this rank computes for `trainer.predict`."""
        return nullcontext()

    def _lockstep_end(self) -> None:
        """Do what is left to do on this rank when the trainer shuts down without a failure."""

    @classmethod
    def _lockstep_check(cls, options: Options) -> None:
        """Raise for what can be told from the class: on the driver, before any worker starts."""
        if cls.setup is TrainingOperator.setup:
            raise _no_setup(cls)
        check_own_wrapper(options)

    # ---------------------------------------------------------------- other ways to make one

    from_creators = classmethod(operator_factories.from_creators)
    from_model = classmethod(operator_factories.from_model)

    @classmethod
    def from_lightning(cls, module_cls: Any, *args: Any, **kwargs: Any) -> type[TrainingOperator]:
        """An operator class around a LightningModule; see
        `lockstep.integrations.lightning.from_lightning`."""
        from lockstep.integrations import lightning

        return lightning.from_lightning(cls, module_cls, *args, **kwargs)

    from_ptl = from_lightning


def _no_setup(operator_cls: type[TrainingOperator]) -> NotOverriddenError:
    return NotOverriddenError(
        f"{operator_cls.__name__} must override setup(self, config)",
        fix="call self.register(models=..., optimizers=...) in it",
    )


def _move_to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with every tensor on `device`.

    Follows mappings, lists, tuples and dataclasses; anything else that has a `.to` (a
    `BatchEncoding`, a `PackedSequence`, a graph batch) is asked itself; the rest (strings,
    numbers, None) is returned as it is.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if type(batch) in (list, tuple):  # the common case, before slower questions
        return type(batch)(_move_to_device(child, device) for child in batch)
    # Checked before containers: a BatchEncoding is a mapping whose own `.to` keeps its class.
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    children = children_of(batch)
    if children is None:
        return batch
    return rebuild_container(batch, [_move_to_device(child, device) for _, child in children])
