# SPDX-License-Identifier: Apache-2.0
"""`TorchTrainer.as_trainable`: makes a class whose instances are trials of Ray Tune."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import ray
from lockstep.engine.placement_group import bundle_for, warn_of_missing_resources
from lockstep.errors import ConfigurationError, WrongTypeError
from lockstep.integrations.optional_packages import import_optional
from lockstep.integrations.tune import trial_checkpoint
from lockstep.keys import BATCH_COUNT, NUM_SAMPLES
from lockstep.trainer.argument_checks import (
    check_config,
    check_operator,
    pick_gpu,
    require_count,
)

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory, Trainable

    from lockstep.trainer import TorchTrainer
else:
    _tune = import_optional("ray.tune", extra="tune", by="TorchTrainer.as_trainable")
    Trainable, PlacementGroupFactory = _tune.Trainable, _tune.PlacementGroupFactory

_COUNTS: Final = (NUM_SAMPLES, BATCH_COUNT, "epoch")

TuneStep = Callable[["TorchTrainer", dict[str, Any]], dict[str, Any]]
"""``override_tune_step(trainer, info)``; `info` is ``{"iteration": n}``, n from 0."""


class TorchTrainable(Trainable):
    """One trial: a `TorchTrainer` of its own. Made by `as_trainable`.

    Attributes:
        trainer: the trainer of the trial.
    """

    trainer_cls: type[TorchTrainer]
    arguments: Mapping[str, Any]
    tune_step: tuple[TuneStep] | None = None

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        """One bundle for each worker and spare; a trial that only drives them needs nothing."""
        given = cls.arguments
        num_workers = config.get("num_workers", given.get("num_workers", 1))
        spares = given.get("spare_workers", 0)
        require_count("num_workers", num_workers)
        require_count("spare_workers", spares, least=0)
        custom_resources = given.get("resources_per_worker")
        in_one_process = given.get("sync") == "data_parallel"
        gpus = int(given["use_gpu"]) * (num_workers if in_one_process else 1)
        worker = bundle_for(given.get("num_cpus_per_worker", 1), gpus, custom_resources)
        num_processes = 1 if in_one_process else num_workers + spares
        local = given.get("use_local") or (num_processes == 1 and not gpus and not custom_resources)
        warn_of_missing_resources(worker, num_processes, f"a trial of {cls.__name__}")
        # The first bundle is for the trial's own process, which may be rank 0.
        others = [worker] * (num_processes - bool(local))
        return PlacementGroupFactory([worker if local else {}, *others], strategy="PACK")

    def setup(self, config: dict[str, Any]) -> None:
        self.trainer = self._make_trainer(config)

    def _make_trainer(self, config: Mapping[str, Any]) -> TorchTrainer:
        arguments = dict(self.arguments)
        merged = {**(arguments.get("config") or {}), **config}
        if "num_workers" in config:
            arguments["num_workers"] = merged.pop("num_workers")
        arguments["config"] = merged
        return self.trainer_cls(**arguments)

    def step(self) -> dict[str, Any]:
        result = self._step()
        # The name by which Tune's Trainable knows that a trial has ended.
        return {**result, "done": True} if self.trainer.should_stop else result

    def _step(self) -> dict[str, Any]:
        if self.tune_step is None:
            return _train_and_validate(self.trainer)
        result = self.tune_step[0](self.trainer, {"iteration": self.training_iteration})
        if not isinstance(result, dict):
            raise WrongTypeError(
                "override_tune_step returned something else than results",
                expected="a dict from names to values",
                got=f"{type(result).__name__}: {result!r:.60}",
            )
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        trial_checkpoint.write(self.trainer, checkpoint_dir)

    def load_checkpoint(self, checkpoint: Any) -> None:
        trial_checkpoint.read(self.trainer, checkpoint)

    def cleanup(self) -> None:
        self.trainer.shutdown()


def _train_and_validate(trainer: TorchTrainer) -> dict[str, Any]:
    """Train and validate; the merged results.

    A metric of both is that of the validation, as in `MetricMonitor`; a count that of the training.
    """
    trained = trainer.train(profile=True)
    if not trainer._workers.has_loader("validation"):
        return dict(trained)
    validated = trainer.validate(profile=True)
    times = {**validated.pop("profile", {}), **trained.pop("profile", {})}
    counts = {key: trained[key] for key in _COUNTS if key in trained}
    return {**trained, **validated, **counts, "profile": times}


def as_trainable(
    trainer_cls: type[TorchTrainer],
    *,
    override_tune_step: TuneStep | None = None,
    **arguments: Any,
) -> type[TorchTrainable]:
    """See `TorchTrainer.as_trainable`."""
    operator = check_operator(arguments.get("training_operator_cls"))
    check_config(arguments.get("config"))
    if override_tune_step is not None:
        _check_takes_two(override_tune_step)
    _refuse_states_of_others(arguments)
    # "auto" is decided here: the process of a trial that only drives workers sees no GPU.
    gpu = pick_gpu(arguments.get("use_gpu", "auto"))
    if arguments.get("use_gpu", "auto") == "auto" and not gpu and ray.is_initialized():
        gpu = ray.cluster_resources().get("GPU", 0) > 0
    members = {
        "__doc__": TorchTrainable.__doc__,
        "trainer_cls": trainer_cls,
        "arguments": {**arguments, "use_gpu": gpu},
        # In a tuple: as a class attribute a function becomes a method.
        "tune_step": None if override_tune_step is None else (override_tune_step,),
    }
    return type(f"{operator.__name__}Trainable", (TorchTrainable,), members)


def _refuse_states_of_others(arguments: Mapping[str, Any]) -> None:
    """Refuse a state to begin with: all trials would train with its learning rate."""
    for name in ("checkpoint_dir", "checkpoint_every", "resume"):
        if arguments.get(name) is not None:
            raise ConfigurationError(
                f"a trial takes no {name}: its state is kept by Tune",
                got=f"as_trainable({name}={arguments[name]!r:.60})",
                cause="one trial would go on with the weights and the learning rate of another",
                fix="tune.RunConfig(checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1)"
                ", failure_config=tune.FailureConfig(max_failures=2)); to start from trained"
                " weights, load them in setup",
            )


def _check_takes_two(function: Any) -> None:
    try:
        inspect.signature(function).bind("trainer", {})
    except TypeError as error:
        raise ConfigurationError(
            "override_tune_step does not take (trainer, info)",
            got=f"{getattr(function, '__name__', 'it')}{inspect.signature(function)}",
            fix="def tune_step(trainer, info): ...; info holds the iteration",
        ) from error
