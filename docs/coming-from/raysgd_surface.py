# SPDX-License-Identifier: Apache-2.0
"""Every public name and keyword of RaySGD 1.3, called here: same, better, refused or gone."""

from __future__ import annotations

import logging
import os
import tempfile

import ray.data
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from surface import (
    ROWS,
    OfRows,
    Points,
    Sums,
    Table,
    average,
    averages,
    inside,
    registering,
    timer,
    timers,
    with_trainer,
)
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, SequentialSampler

import lockstep
import ray
from lockstep import TorchTrainer, TrainingOperator, keys, metrics
from lockstep.operator import override

TRAIN = {"num_samples", "epoch", "batch_count", "train_loss", "last_train_loss"}
VALIDATE = {
    "num_samples",
    "batch_count",
    "val_loss",
    "last_val_loss",
    "val_accuracy",
    "last_val_accuracy",
}


def halving(optimizer):
    return StepLR(optimizer, 1, gamma=0.5)


def modules(table: Table) -> None:
    table.head("ray.util.sgd, ray.util.sgd.torch, ray.util.sgd.data")
    table.same("TorchTrainer", lambda: lockstep.TorchTrainer is TorchTrainer)
    table.same("TrainingOperator", lambda: lockstep.TrainingOperator is TrainingOperator)
    table.gone("TFTrainer", "lockstep trains torch models", lambda: lockstep.TFTrainer)
    table.gone("PyTorchTrainer", "RaySGD refused it, too", lambda: lockstep.PyTorchTrainer)
    table.gone(
        "CreatorOperator",
        "what TrainingOperator.from_creators returns is a TrainingOperator",
        lambda: lockstep.CreatorOperator,
    )
    table.gone(
        "BaseTorchTrainable",
        "what TorchTrainer.as_trainable returns is a tune.Trainable",
        lambda: lockstep.BaseTorchTrainable,
    )
    table.refused(
        "data.Dataset",
        lambda: with_trainer(lambda one: one.train(dataset=[1, 2, 3], num_steps=1)),
    )


def names(table: Table) -> None:
    table.head("ray.util.sgd.utils, ray.util.sgd.torch.constants")
    for name, value in {
        "BATCH_SIZE": "*batch_size",
        "NUM_SAMPLES": "num_samples",
        "BATCH_COUNT": "batch_count",
        "USE_FP16": "__use_fp16__",
        "NUM_STEPS": "__num_steps__",
        "SCHEDULER_STEP": "scheduler_step",
        "SCHEDULER_STEP_BATCH": "batch",
        "SCHEDULER_STEP_EPOCH": "epoch",
        "SCHEDULER_STEP_MANUAL": "manual",
        "VALID_SCHEDULER_STEP": {"batch", "epoch", "manual"},
    }.items():
        table.same(f"{name}, in lockstep.keys", lambda name=name: getattr(keys, name), value)
    table.same("AverageMeter, in lockstep.metrics", average)
    table.same("AverageMeterCollection, in lockstep.metrics", averages)
    table.same("TimerStat, in lockstep.metrics", timer)
    table.same("TimerCollection, in lockstep.metrics", timers)
    table.same(
        "override, in lockstep.operator",
        lambda: override(TrainingOperator)(Points.setup) is Points.setup,
    )
    table.gone(
        "find_free_port", "ports are bound where they are chosen", lambda: lockstep.find_free_port
    )
    table.gone("check_for_failure", "calls raise", lambda: lockstep.check_for_failure)
    table.gone("NCCL_TIMEOUT_S", "timeout_s, for every backend", lambda: keys.NCCL_TIMEOUT_S)
    table.gone(
        "RESIZE_COOLDOWN_S",
        "a worker that comes back joins when it is ready",
        lambda: keys.RESIZE_COOLDOWN_S,
    )


def trainer_arguments(table: Table) -> None:
    table.head("TorchTrainer(...)")
    table.same("training_operator_cls", lambda: with_trainer(lambda one: set(one.train())), TRAIN)
    called = []
    table.better(
        "initialization_hook",
        "with one worker as well",
        lambda: with_trainer(lambda one: called, initialization_hook=lambda: called.append(1)),
        [1],
    )
    table.same("config", lambda: inside(lambda op: op.config["lr"], config={"lr": 0.5}), 0.5)
    table.better(
        "config[BATCH_SIZE]",
        "the global batch, split exactly, and never rewritten",
        lambda: with_trainer(
            lambda one: one.config[keys.BATCH_SIZE], num_shards=2, config={keys.BATCH_SIZE: 7}
        ),
        7,
    )
    with_trainer(lambda two: two_workers(table, two), num_workers=2)
    table.same('use_gpu="auto"', lambda: inside(lambda op: op.use_gpu, use_gpu="auto"), False)
    table.refused("use_gpu=True, without a GPU", lambda: with_trainer(bool, use_gpu=True))
    table.same("backend", lambda: with_trainer(lambda one: True, backend="gloo"))
    table.refused('backend="mpi"', lambda: with_trainer(bool, backend="mpi"))
    table.better(
        "wrap_ddp=False",
        "your own wrapper synchronises, and the watch compares replicas",
        lambda: with_trainer(lambda one: set(one.train()), wrap_ddp=False),
        TRAIN,
    )
    table.better(
        "timeout_s", "for nccl as well", lambda: with_trainer(lambda one: True, timeout_s=60)
    )
    table.better(
        "use_fp16",
        "torch's own mixed precision; precision= says which",
        lambda: inside(lambda op: op.use_fp16, use_fp16=True),
    )
    table.better(
        "use_tqdm",
        "knows how many batches there are",
        lambda: inside(lambda op: op.use_tqdm, use_tqdm=True),
    )
    table.better(
        "add_dist_sampler",
        "your sampler and order stay, and each row is read once",
        lambda: with_trainer(lambda one: one.train()["num_samples"], num_shards=2),
        ROWS,
    )
    table.same(
        "add_dist_sampler=False",
        lambda: with_trainer(lambda one: one.train()["num_samples"], add_dist_sampler=False),
        ROWS,
    )
    table.same(
        "scheduler_step_freq", lambda: rate_after_an_epoch(scheduler_step_freq="epoch"), 0.05
    )
    table.refused(
        'scheduler_step_freq="daily"', lambda: with_trainer(bool, scheduler_step_freq="daily")
    )
    table.same("use_local", lambda: inside(lambda op: op.world_rank, use_local=True), 0)
    for name in (
        *("num_replicas", "batch_size", "model_creator", "optimizer_creator", "data_creator"),
        *("loss_creator", "scheduler_creator", "data_loader_args", "apex_args"),
        "serialize_data_creation",
    ):
        table.refused(name, lambda name=name: TorchTrainer(**{name: 1}))


def two_workers(table, two):
    table.same("num_workers", lambda: two.status()["workers"], 2)
    table.better(
        "num_cpus_per_worker",
        "as many threads of torch as well",
        lambda: two.apply_all_workers(torch.get_num_threads),
        [1, 1],
    )
    table.same("apply_all_workers(fn)", lambda: two.apply_all_workers(lambda: 3), [3, 3])
    table.same(
        "apply_all_operators(fn)", lambda: two.apply_all_operators(lambda op: op.world_rank), [0, 1]
    )
    for name, call in (("train", two.train), ("validate", two.validate)):
        table.same(
            f"{name}(reduce_results=False)",
            lambda call=call: sum(each["num_samples"] for each in call(reduce_results=False)),
            ROWS,
        )


def rate_after_an_epoch(**arguments):
    class Halves(Points):
        def setup(self, config):
            super().setup(config)
            self.scheduler = halving(self.optimizer)

    def rate(one):
        one.train()
        return one.get_local_operator().optimizer.param_groups[0]["lr"]

    return with_trainer(rate, Halves, **arguments)


def calls(table: Table) -> None:
    table.head("train(...) and validate(...)")
    with TorchTrainer(training_operator_cls=Points, num_shards=2) as one:
        table.better(
            "train()",
            "a mean over all rows of all workers, each once",
            lambda: set(one.train()),
            TRAIN,
        )
        table.same("train(num_steps)", lambda: one.train(num_steps=4)["batch_count"], 4)
        table.same(
            "train(profile)", lambda: set(one.train(profile=True)["profile"]) >= {"mean_fwd_s"}
        )
        table.better(
            "train(max_retries)",
            "for each death; no committed step is lost",
            lambda: set(one.train(max_retries=1)),
            TRAIN,
        )
        table.better("validate()", "exact on uneven shards", lambda: set(one.validate()), VALIDATE)
        table.same("validate(num_steps)", lambda: one.validate(num_steps=1)["batch_count"], 1)
        table.same(
            "validate(profile)",
            lambda: set(one.validate(profile=True)["profile"]),
            {"mean_eval_fwd_s", "mean_validation_s"},
        )
        table.same("validate(info)", lambda: one.validate(info={"mine": 1})["batch_count"] > 0)
    table.same(
        "train(info)",
        lambda: with_trainer(lambda two: two.train(info={"mine": 7})["mine"], Sums),
        7,
    )
    table.same("train(info), an epoch_idx of its own", epoch_idx, [0, 1])
    table.better(
        "train(dataset)",
        "a ray.data.Dataset, each row once an epoch",
        lambda: with_trainer(
            lambda one: one.train(dataset=rows())["num_samples"],
            OfRows,
            config={keys.BATCH_SIZE: 7},
        ),
        ROWS,
    )


def rows():
    return ray.data.from_items([{"point": [1.0, 2.0, 3.0], "target": 1}] * ROWS)


def epoch_idx():
    seen = []

    class Sees(Points):
        def train_epoch(self, iterator, info):
            seen.append(info["epoch_idx"])
            return super().train_epoch(iterator, info)

    with_trainer(lambda one: [one.train(info={"epoch_idx": 9}), one.train()], Sees)
    return seen


def other_calls(table: Table) -> None:
    table.head("further methods of TorchTrainer")
    table.same("update_scheduler(metric)", updated, 0.05)
    with TorchTrainer(training_operator_cls=Points) as one, tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state")
        table.better("get_model()", "on the CPU", lambda: type(one.get_model()), nn.Linear)
        table.better(
            "get_local_operator()",
            "with one worker as well",
            lambda: isinstance(one.get_local_operator(), Points),
        )
        state = one.state_dict()
        table.better(
            "state_dict()",
            "the position in the data as well",
            lambda: state.keys() > {"epoch", "operator", "models", "optimizers", "schedulers"},
        )
        table.same("load_state_dict(state)", lambda: one.load_state_dict(state), None)
        table.same("load_state_dict(blocking=True)", lambda: one.load_state_dict(state, True), None)
        table.refused("load_state_dict(blocking=False)", lambda: one.load_state_dict(state, False))
        table.better("save(path)", "whole or not at all", lambda: one.save(path), path)
        table.better("load(path)", "checked, and runs no code", lambda: one.load(path), None)
        table.gone("restore()", "RaySGD refused it, too: load", lambda: one.restore)
        table.gone("worker_group", "status()", lambda: one.worker_group)
        table.gone("max_replicas", "status()", lambda: one.max_replicas)
        table.same("config", lambda: one.config, {})
        one.shutdown()
        table.refused("shutdown(force), then any method", one.train)
    table.same(
        "as_trainable(...)",
        lambda: TorchTrainer.as_trainable(training_operator_cls=Points) is not None,
    )
    table.refused(
        "as_trainable(override_tune_step)",
        lambda: TorchTrainer.as_trainable(
            training_operator_cls=Points, override_tune_step=lambda trainer: {}
        ),
    )


def updated():
    def rate(one):
        one.train()
        one.update_scheduler(1.0)
        return one.get_local_operator().back[1].param_groups[0]["lr"]

    class Halves(Points):
        def setup(self, config):
            super().setup(config)
            self.scheduler = halving(self.optimizer)
            self.back = (self.model, self.optimizer)

    return with_trainer(rate, Halves, scheduler_step_freq="manual")


class TwoLoaders(Points):
    def setup(self, config):
        super().setup(config)
        loader = DataLoader([1])
        self.register_data(train_loader=[loader, loader])


def operator_calls(table: Table) -> None:
    table.head("TrainingOperator: what setup calls")
    table.same(
        "register(models, optimizers)",
        lambda: [type(each) for each in inside(lambda op: op.back, registering())],
        [nn.Linear, torch.optim.SGD],
    )
    table.better(
        "register(criterion)",
        "parameters in it are synchronised and saved",
        lambda: inside(lambda op: len(op.back), registering(criterion=lambda _: nn.MSELoss())),
        3,
    )
    table.same(
        "register(schedulers)",
        lambda: inside(
            lambda op: type(op.back[2]),
            registering(schedulers=halving),
            scheduler_step_freq="epoch",
        ),
        StepLR,
    )
    table.refused(
        "register(schedulers), no scheduler_step_freq",
        lambda: inside(bool, registering(schedulers=halving)),
    )
    unused = {"find_unused_parameters": True}
    table.same(
        'register(ddp_args), with sync="ddp"',
        lambda: inside(lambda op: len(op.back), registering(ddp_args=lambda _: unused), sync="ddp"),
        2,
    )
    table.refused(
        "register(ddp_args)", lambda: inside(bool, registering(ddp_args=lambda _: unused))
    )
    table.refused("register(apex_args)", lambda: inside(bool, registering(apex_args=lambda _: {})))
    table.better(
        "register_data(train_loader)",
        "kept as it is: sampler, generator, workers",
        lambda: inside(lambda op: type(op._lockstep.loaders["train"].sampler)),
        SequentialSampler,
    )
    table.same(
        "register_data(validation_loader)",
        lambda: inside(lambda op: type(op._lockstep.loaders["validation"])),
        DataLoader,
    )
    table.refused("register_data(train_loader=[a, b])", lambda: inside(bool, TwoLoaders))


def operator_overrides(table: Table) -> None:
    table.head("TrainingOperator: what one overrides, reads, and makes it from")
    for name in ("train_epoch", "train_batch", "validate", "validate_batch"):
        table.same(f"{name}(...)", lambda name=name: overridden(name), [name])
    table.refused("setup(config), left out", lambda: with_trainer(bool, TrainingOperator))
    table.better(
        "state_dict(), load_state_dict(state)", "of each rank", operator_state, {"mine": 1}
    )
    table.better(
        "self.scheduler, not registered",
        "saved as well",
        lambda: rate_after_an_epoch(scheduler_step_freq="epoch"),
        0.05,
    )
    table.refused("self.scheduler, no scheduler_step_freq", rate_after_an_epoch)
    for name, value in {
        "device": torch.device("cpu"),
        "device_ids": None,
        "world_rank": 0,
        "local_rank": 0,
        "use_gpu": False,
        "use_fp16": False,
        "use_tqdm": False,
        "scheduler_step_freq": None,
        "global_step": 0,
    }.items():
        table.same(name, lambda name=name: inside(lambda op: getattr(op, name)), value)
    table.same("timers", lambda: inside(lambda op: type(op.timers)), metrics.TimerCollection)
    table.same("from_creators(...)", lambda: created(serialize_data_creation=False), TRAIN)
    table.better(
        "from_creators(serialize_data_creation)",
        "the lock file does not stay",
        lambda: created(serialize_data_creation=True),
        TRAIN,
    )
    table.better(
        "from_ptl(train_dataloader, val_dataloader)",
        "all hooks; numbers that steps return are results",
        from_lightning,
    )


def from_lightning():
    def ask(one):
        result, inside = one.train(), one.get_local_operator()
        return result["num_samples"] == 64 and inside.get_model() is inside.module

    loader = BoringModel().train_dataloader()
    return with_trainer(ask, TrainingOperator.from_ptl(BoringModel, loader, loader))


def overridden(name):
    called = []

    def own(self, *arguments):
        called[:] = [name]
        return getattr(super(Own, self), name)(*arguments)

    Own = type("Own", (Points,), {name: own})
    with_trainer(lambda one: [one.train(), one.validate()], Own)
    return called


def operator_state():
    class Keeps(Points):
        def state_dict(self):
            return {"mine": 1}

        def load_state_dict(self, state):
            self.loaded = state

    def loaded(one):
        one.load_state_dict(one.state_dict())
        return one.get_local_operator().loaded

    return with_trainer(loaded, Keeps)


def created(**arguments):
    operator = TrainingOperator.from_creators(
        lambda config: nn.Linear(3, 2),
        lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda config: DataLoader([(torch.ones(3), 1)] * 4, batch_size=2),
        nn.CrossEntropyLoss,
        lambda optimizer, config: halving(optimizer),
        **arguments,
    )
    return with_trainer(lambda one: set(one.train()), operator, scheduler_step_freq="batch")


def main() -> None:
    ray.init("local", num_cpus=4, logging_level=logging.ERROR, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    table = Table()
    for part in (
        *(modules, names, trainer_arguments, calls, other_calls),
        *(operator_calls, operator_overrides),
    ):
        part(table)
    print(f"\n{len(table.names)} names and keywords, each called")
    if table.wrong:
        raise SystemExit("not as claimed:\n" + "\n".join(table.wrong))


if __name__ == "__main__":
    main()
