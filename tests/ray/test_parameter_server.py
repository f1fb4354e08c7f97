# SPDX-License-Identifier: Apache-2.0
"""sync="parameter_server" with real workers: one process's result, and nobody left waiting."""

import os
import signal

import pytest
import torch
from tests.procs.odd_optimizers import Lookahead
from tests.ray.operators import (
    GLOBAL_BATCH,
    STEPS,
    DefaultLoop,
    PlainBackward,
    farthest,
    net,
    one_process,
    problem,
    sgd,
)
from tests.ray.test_failures import Misbehaving, _alive, exit_process
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import TrainerClosedError, WorkerDiedError
from lockstep.keys import BATCH_SIZE

CONFIG = {BATCH_SIZE: GLOBAL_BATCH}


def start(operator=DefaultLoop, num_workers=2, config=CONFIG, **options):
    return TorchTrainer(
        training_operator_cls=operator,
        num_workers=num_workers,
        config=config,
        sync="parameter_server",
        **options,
    )


def server_of(trainer):
    return trainer._workers._engine.workers.server


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_default_loop_saved_and_loaded(num_workers, tmp_path):
    with start(num_workers=num_workers, num_shards=4) as trainer:
        trainer.train(num_steps=STEPS - 4)
        path = trainer.save(tmp_path / "state")
        assert trainer.verify(num_steps=2).ok
        trainer.train(num_steps=2)
        trainer.load(path)
        trainer.train(num_steps=4)
        assert farthest(trainer.get_model(), one_process()) < 1e-12
        state = trainer.state_dict()["optimizers"][0]
        assert len(state["state"]) == 4
        server = None if num_workers == 1 else server_of(trainer).pid
        assert server is None or _alive(server)
    assert server is None or not _alive(server)


class Ahead(DefaultLoop):
    """A scheduler sets the learning rate of an optimizer that has another one within it."""

    def setup(self, config):
        model = net()
        optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.05))
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.MSELoss(),
            schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7),
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_optimizer_within_another_one_saved_and_loaded(num_workers, tmp_path):
    options = {"scheduler_step_freq": "batch"}
    with start(Ahead, num_workers, **options) as trainer:
        trainer.train(num_steps=4)
        path = trainer.save(tmp_path / "state")
        trainer.train(num_steps=4)
        expected = trainer.get_model()
    with start(Ahead, num_workers, **options) as trainer:
        trainer.load(path)
        (inner,) = trainer.state_dict()["inner_optimizers"]
        assert len(inner["state"]) == 4
        trainer.train(num_steps=4)
        assert farthest(trainer.get_model(), expected) == 0.0
    alone = TorchTrainer(training_operator_cls=Ahead, num_workers=1, config=CONFIG, **options)
    with alone as trainer:
        trainer.train(num_steps=8)
        assert farthest(trainer.get_model(), expected) < 1e-9


@pytest.mark.other_workers
def test_a_loop_of_ones_own_with_rank_0_here():
    with start(PlainBackward, use_local=True) as trainer:
        trainer.train(num_steps=STEPS)
        by_forward, by_method = trainer.get_model()
    assert farthest(by_forward, one_process()) < 1e-12
    assert farthest(by_method, one_process("another_way")) < 1e-12


@pytest.mark.slow
def test_objects_handed_in_hold_the_trained_weights():
    model = net()
    optimizer = sgd(model)
    loader = DataLoader(TensorDataset(*problem()), GLOBAL_BATCH // 2)
    operator = TrainingOperator.from_model(
        model, optimizer=optimizer, criterion=nn.MSELoss(), train_loader=loader
    )
    with start(operator) as trainer:
        trainer.train(num_steps=STEPS)
        assert farthest(model, one_process()) < 1e-12
        assert len(optimizer.state) == 4


@pytest.mark.slow
def test_a_death_that_may_not_be_recovered_from_is_named():
    trainer = start(Misbehaving, config={**CONFIG, "what": exit_process})
    pids = [*trainer.apply_all_workers(os.getpid), server_of(trainer).pid]
    with pytest.raises(WorkerDiedError, match="rank 1"):
        trainer.train(max_retries=0)
    assert not any(map(_alive, pids))


class EndsTheServer(DefaultLoop):
    """Rank 1 kills the process that `victim` names, in the middle of a step."""

    victim = None

    def compute_loss(self, batch, batch_info):
        if self.victim and self.world_rank == 1:
            os.kill(self.victim, signal.SIGKILL)
        return super().compute_loss(batch, batch_info)


@pytest.mark.slow
def test_a_server_that_dies_in_a_step_is_named():
    trainer = start(EndsTheServer)
    pids = [*trainer.apply_all_workers(os.getpid), server_of(trainer).pid]
    trainer.train(num_steps=2)

    def choose(operator, victim=pids[-1]):
        operator.victim = victim

    trainer.apply_all_operators(choose)
    with pytest.raises(WorkerDiedError, match="parameter server"):
        trainer.train()
    assert not any(map(_alive, pids))
    with pytest.raises(TrainerClosedError, match="parameter server"):
        trainer.train()


@pytest.mark.slow
def test_weights_can_be_had_when_the_server_is_gone():
    with start() as trainer:
        trainer.train(num_steps=STEPS)
        os.kill(server_of(trainer).pid, signal.SIGKILL)
        assert farthest(trainer.get_model(), one_process()) < 1e-12
        with pytest.raises(WorkerDiedError, match="parameter server"):
            trainer.state_dict()
        assert farthest(trainer.get_model(), one_process()) < 1e-12
