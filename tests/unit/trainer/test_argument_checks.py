# SPDX-License-Identifier: Apache-2.0
"""RaySGD's arguments and methods are there with its defaults; what cannot be right says why."""

import inspect

import pytest
import torch
from tests.unit.trainer.programs import Regression, linear, loader, sgd, trainer
from torch import nn

from lockstep import Callback, TorchTrainer, TrainingOperator
from lockstep.errors import (
    ConfigurationError,
    LockstepError,
    NotAvailableError,
    UnknownParameterError,
    WrongTypeError,
)
from lockstep.keys import BATCH_SIZE

RAYSGD_ARGUMENTS = {
    "initialization_hook": None, "config": None, "num_workers": 1, "num_cpus_per_worker": 1,
    "use_gpu": "auto", "backend": "auto", "wrap_ddp": True, "timeout_s": 1800,
    "use_fp16": False, "use_tqdm": False, "add_dist_sampler": True,
    "scheduler_step_freq": None, "use_local": False,
}  # fmt: skip
OURS = {
    "sync": "replicate",
    "num_shards": None, "precision": "fp32", "seed": 0, "resources_per_worker": None,
    "bucket_cap_mb": 25, "callbacks": (), "reproducible": False, "accumulate": 1,
    "clip_grad_norm": None, "spare_workers": 0, "min_workers": 1, "hang_timeout_s": 60,
    "audit": "watch", "checkpoint_dir": None, "checkpoint_every": None, "keep_checkpoints": 3,
    "resume": None, "check_finite": True, "memory_checkpoint_every": "auto",
    "shadow_every": 0, "shadow_limit": 3,
}  # fmt: skip
RAYSGD_METHODS = {
    "train": {"num_steps": None, "profile": False, "reduce_results": True, "max_retries": 3,
              "info": None, "dataset": None},
    "validate": {"num_steps": None, "profile": False, "reduce_results": True, "info": None},
    "update_scheduler": {"metric": inspect.Parameter.empty},
    "get_model": {},
    "get_local_operator": {},
    "state_dict": {},
    "save": {"path": inspect.Parameter.empty},
    "load": {"path": inspect.Parameter.empty},
    "apply_all_workers": {"fn": inspect.Parameter.empty},
    "apply_all_operators": {"fn": inspect.Parameter.empty},
    "shutdown": {"force": False},
}  # fmt: skip
OPERATOR_METHODS = [
    "setup",
    "register",
    "register_data",
    "train_epoch",
    "train_batch",
    "validate",
    "validate_batch",
    "state_dict",
    "load_state_dict",
    "from_creators",
    "from_ptl",
    "from_lightning",
    "from_model",
    "compute_loss",
    "backward",
    "to_device",
]
OPERATOR_PROPERTIES = [
    "device",
    "device_ids",
    "config",
    "world_rank",
    "local_rank",
    "use_gpu",
    "use_fp16",
    "use_tqdm",
    "scheduler_step_freq",
]


def defaults(function):
    parameters = inspect.signature(function).parameters
    return {
        name: p.default
        for name, p in parameters.items()
        if name not in ("self", "training_operator_cls") and p.kind is not p.VAR_KEYWORD
    }


def test_the_trainers_arguments_and_defaults():
    assert defaults(TorchTrainer.__init__) == RAYSGD_ARGUMENTS | OURS
    kinds = {p.kind for p in inspect.signature(TorchTrainer).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


@pytest.mark.parametrize("method", RAYSGD_METHODS)
def test_the_trainers_methods_and_defaults(method):
    assert defaults(getattr(TorchTrainer, method)) == RAYSGD_METHODS[method]


def test_the_arguments_of_register_and_their_defaults():
    empty = inspect.Parameter.empty
    assert defaults(TrainingOperator.register) == {
        "models": empty, "optimizers": empty, "criterion": None, "schedulers": None,
        "ema": None, "ddp_args": None, "shard": "whole", "mp_policy": None,
        "dp_shard_size": None, "loss_reduction": "mean",
    }  # fmt: skip
    loaders = {"train_loader": None, "validation_loader": None}
    assert defaults(TrainingOperator.register_data) == loaders


def test_the_operators_methods_and_properties():
    assert [
        name for name in OPERATOR_METHODS if not callable(getattr(TrainingOperator, name))
    ] == []
    with trainer(config={"lr": 1}) as one:
        operator = one.get_local_operator()
        values = {name: getattr(operator, name) for name in OPERATOR_PROPERTIES}
        assert operator.global_step == 0
        assert operator.timers.stats() == {}
    assert values == {
        "device": torch.device("cpu"), "device_ids": None, "config": {"lr": 1}, "world_rank": 0,
        "local_rank": 0, "use_gpu": False, "use_fp16": False, "use_tqdm": False,
        "scheduler_step_freq": None,
    }  # fmt: skip


def test_the_operator_knows_how_it_was_asked_to_train():
    with trainer(use_tqdm=True, use_fp16=True, scheduler_step_freq="epoch") as one:
        operator = one.get_local_operator()
        assert (operator.use_tqdm, operator.use_fp16) == (True, True)
        assert operator.scheduler_step_freq == "epoch"


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": 2.0}, "an int, 1 or more"),
        ({"num_workers": 3, "num_shards": 2}, "num_shards=3"),
        ({"num_shards": 2, "add_dist_sampler": False}, "leave num_shards out"),
        ({"num_cpus_per_worker": 0}, "num_cpus_per_worker=0"),
        ({"num_cpus_per_worker": "2"}, "a number above zero"),
        ({"timeout_s": -1}, "timeout_s=-1"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ({"clip_grad_norm": 0}, "clip_grad_norm=0"),
        ({"clip_grad_norm": "1"}, "a positive norm"),
        ({"spare_workers": 1}, "num_workers=2 or more"),
        ({"min_workers": 2}, "min_workers=2"),
        ({"hang_timeout_s": 0}, "hang_timeout_s"),
        ({"seed": "zero"}, "an int"),
        ({"backend": "mpi"}, '"auto", "nccl" or "gloo"'),
        ({"backend": "nccl", "use_gpu": False}, '"gloo" or "auto"'),
        ({"use_gpu": "yes"}, 'True, False or "auto"'),
        ({"precision": "fp8"}, '"fp32", "bf16" or "fp16"'),
        ({"precision": "bf16", "use_fp16": True}, "one precision"),
        ({"scheduler_step_freq": "step"}, '"batch", "epoch", "manual" or None'),
        ({"config": {BATCH_SIZE: 0}}, "a positive int"),
        ({"config": {BATCH_SIZE: 1.5}}, "a positive int"),
        ({"apex_args": {}}, "precision='bf16'"),
        ({"num_replicas": 2}, "num_workers=..."),
        ({"model_creator": linear}, "from_creators"),
        ({"serialize_data_creation": True}, "from_creators(..., serialize_data_creation=True)"),
    ],
)
def test_a_wrong_value_is_refused_with_what_to_type(arguments, needed):
    with pytest.raises(ValueError, match="LS001") as caught:
        trainer(**arguments)
    assert isinstance(caught.value, ConfigurationError)
    assert needed in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ({"config": [1]}, "a dict, given to setup"),
        ({"no_such": 1}, "'no_such'"),
        ({"initialization_hook": 3}, "a function without arguments"),
        ({"callbacks": [Callback]}, "callbacks=[MyCallback()]"),
        ({"callbacks": [print]}, "instances of subclasses of lockstep.Callback"),
    ],
)
def test_a_wrong_kind_is_refused_with_what_to_type(arguments, needed):
    with pytest.raises(TypeError) as caught:
        trainer(**arguments)
    assert needed in str(caught.value)


def test_a_misspelt_argument_is_recognised():
    with pytest.raises(TypeError, match="did you mean num_workers"):
        trainer(num_worker=2)


def test_an_argument_of_register_is_told_where_it_belongs():
    with pytest.raises(TypeError, match=r"self\.register\(ema=\.\.\.\)"):
        trainer(ema=0.9)


def test_what_is_no_dataset_is_refused():
    with trainer() as one:
        with pytest.raises(WrongTypeError, match="register a loader"):
            one.train(dataset=[1])
        assert one.train()["batch_count"] == 4


def test_a_gpu_that_is_not_here_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(NotAvailableError, match='use_gpu="auto"'):
        trainer(use_gpu=True, use_local=True)


def test_an_operator_instance_instead_of_the_class():
    with pytest.raises(WrongTypeError, match="training_operator_cls=Regression"):
        TorchTrainer(training_operator_cls=Regression({}))
    for other in (nn.Linear, "Regression"):
        with pytest.raises(WrongTypeError, match="class MyOperator"):
            TorchTrainer(training_operator_cls=other)
    with pytest.raises(TypeError, match="training_operator_cls"):
        TorchTrainer()


def operator_with(setup):
    return type("Custom", (TrainingOperator,), {"setup": setup})


def register(**registered):
    def setup(self, config):
        model = linear()
        everything = {"models": model, "optimizers": sgd(model), **registered}
        self.register(**everything)
        self.register_data(train_loader=loader())

    return operator_with(setup)


def two_times(self, config):
    model = linear()
    for _ in range(2):
        self.register(models=model, optimizers=sgd(model))


def scheduled(self, config):
    model = linear()
    optimizer = sgd(model)
    self.register(
        models=model,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )


def plateau(self, config):
    model = linear()
    optimizer = sgd(model)
    self.register(
        models=model,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    )


@pytest.mark.parametrize(
    ("operator", "error", "needed"),
    [
        (operator_with(lambda self, config: None), ConfigurationError, "self.register(models=..."),
        (TrainingOperator, NotImplementedError, "must override setup(self, config)"),
        (operator_with(scheduled), ConfigurationError, 'scheduler_step_freq="epoch"'),
        (operator_with(two_times), ConfigurationError, "call it once, with lists"),
        (register(models=nn.Linear), TypeError, "pass an instance"),
        (register(models=[]), ConfigurationError, "empty list"),
        (register(optimizers="sgd"), TypeError, "torch Optimizer"),
        (
            register(optimizers=sgd(linear())),
            UnknownParameterError,
            "registered model's parameters",
        ),
        (register(schedulers=torch.optim.lr_scheduler.StepLR), TypeError, "cannot step"),
        (register(ddp_args={"static_graph": True}), ConfigurationError, "leave them out"),
        (register(loss_reduction="product"), ConfigurationError, '"mean" or "sum"'),
        (register(apex_args={"opt_level": "O1"}), ConfigurationError, 'precision="bf16"'),
        (register(scheduler=None), TypeError, "no argument 'scheduler'"),
        (register(train_loader=None), TypeError, "self.register_data(train_loader=..."),
        (None, TypeError, "TrainingOperator.from_creators("),
    ],
)
def test_a_wrong_setup_is_refused_with_what_to_type(operator, error, needed):
    with pytest.raises(error) as caught:
        TorchTrainer(training_operator_cls=operator)
    assert needed in str(caught.value)
    assert isinstance(caught.value, LockstepError)


def test_an_operator_without_its_base_class_is_refused():
    class WithoutBase(Regression):
        def __init__(self, config, context):
            self.own = config

    with pytest.raises(ConfigurationError, match=r"super\(\)\.__init__\(config, context\)"):
        TorchTrainer(training_operator_cls=WithoutBase)


def test_a_plateau_needs_its_metric():
    with pytest.raises(ConfigurationError, match="update_scheduler"):
        TorchTrainer(training_operator_cls=operator_with(plateau), scheduler_step_freq="epoch")


def test_fp16_belongs_to_the_default_loop():
    class Own(Regression):
        def train_batch(self, batch, batch_info):
            return {}

    with pytest.raises(ConfigurationError, match=r"scaler\.scale"):
        TorchTrainer(training_operator_cls=Own, use_fp16=True)


@pytest.mark.parametrize("num_steps", [0, -1, 1.5, "all", True])
def test_a_wrong_num_steps_leaves_the_trainer_usable(num_steps):
    with trainer() as one:
        for call in (one.train, one.validate):
            with pytest.raises(ValueError, match="positive number of global batches"):
                call(num_steps=num_steps)
        with pytest.raises(TypeError, match="info is not a dict"):
            one.train(info=3)
        assert one.train()["batch_count"] == 4


def test_a_forgotten_loader_leaves_the_trainer_usable():
    class NoValidation(Regression):
        def register_data(self, *, train_loader=None, validation_loader=None):
            super().register_data(train_loader=train_loader)

    with trainer(NoValidation) as one:
        with pytest.raises(ConfigurationError, match=r"register_data\(validation_loader=..."):
            one.validate()
        assert one.train()["batch_count"] == 4


def test_a_loader_without_a_batch_is_refused_and_leaves_the_trainer_usable():
    class Empty(Regression):
        def data(self):
            return torch.utils.data.DataLoader(range(3), batch_size=5, drop_last=True)

    with trainer(Empty) as one:
        with pytest.raises(ConfigurationError, match="drop_last=False"):
            one.train()
        assert one.validate()["batch_count"] == 4


@pytest.mark.parametrize("loop", ["train_epoch", "validate"])
def test_a_loop_that_reads_nothing_is_not_told_that_its_loader_is_empty(loop):
    class Forgets(Regression):
        pass

    def reads_nothing(self, iterator, info):
        return {}

    setattr(Forgets, loop, reads_nothing)
    with trainer(Forgets) as one:
        call = one.train if loop == "train_epoch" else one.validate
        with pytest.raises(ConfigurationError, match="for batch in iterator") as caught:
            call()
    assert "drop_last" not in str(caught.value)


def test_the_style_of_ray_0_8_is_told_what_became_of_it():
    with pytest.raises(ConfigurationError, match="from_creators"):
        TorchTrainer(model_creator=lambda config: linear())


class WithoutSetup(TrainingOperator):
    pass


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"training_operator_cls": WithoutSetup}, "must override setup"),
        ({"backend": "mpi"}, "backend"),
        ({"backend": "nccl", "use_gpu": False}, "backend"),
        (
            {"spare_workers": 1, "sync": "fsdp", "memory_checkpoint_every": None},
            "a spare worker cannot take over here",
        ),
        (
            {"spare_workers": 1, "sync": "data_parallel"},
            "its replicas live in one process, and end with it",
        ),
        ({"accumulate": 0}, "accumulate"),
        ({"audit": "loud"}, "audit"),
        ({"checkpoint_every": 5}, "checkpoint_dir"),
    ],
)
def test_what_needs_no_worker_is_said_before_any_starts(arguments, says, monkeypatch):
    def starts(*_, **__):
        raise AssertionError("something was started")

    for name in ("start_ray_engine", "has_gpus_elsewhere", "InlineEngine"):
        monkeypatch.setattr(f"lockstep.trainer.launch.{name}", starts)
    arguments = {"training_operator_cls": Regression, "num_workers": 2, **arguments}
    with pytest.raises(LockstepError) as refused:
        TorchTrainer(**arguments)
    assert says in str(refused.value)
