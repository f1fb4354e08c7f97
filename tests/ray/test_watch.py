# SPDX-License-Identifier: Apache-2.0
"""Every run of a trainer is watched: what breaks is raised, what is right is left in peace."""

import hashlib
import inspect
import logging
import pickle

import pytest
import torch
import torch.distributed as dist
from tests.ray.operators import GLOBAL_BATCH, DefaultLoop, PlainBackward, net, problem, sgd
from torch import nn
from torch.nn.modules import module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer
from lockstep.errors import AuditError
from lockstep.keys import BATCH_SIZE


def start(operator, num_workers=2, **arguments):
    return TorchTrainer(
        training_operator_cls=operator,
        num_workers=num_workers,
        config={BATCH_SIZE: GLOBAL_BATCH},
        **arguments,
    )


def found(operator, before_training=None, **arguments):
    """The error that the second call of `train` raises, if the first one does not."""
    with start(operator, **arguments) as trainer, pytest.raises(AuditError) as caught:
        trainer.train(num_steps=3)
        if before_training is not None:
            trainer.apply_all_operators(before_training)
        trainer.train(num_steps=3)
    return caught.value


def line_with(text, operator):
    lines, first = inspect.getsourcelines(operator)
    return first + next(place for place, line in enumerate(lines) if text in line)


# ----------------------------------------------------------------------------- what is wrong


def write_on_rank_0(operator):
    if operator.world_rank == 0:
        with torch.no_grad():
            operator.model.first.weight.mul_(1.5)


def test_a_write_to_the_weights_of_one_rank():
    error = found(DefaultLoop, write_on_rank_0)
    assert error.code == "LS303"
    assert error.findings[0].step == 4
    for needed in ("[LS303]", "`first.weight`", "ranks 0, 1", "step 4", "fix"):
        assert needed in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.code) == (str(error), "LS303")
    assert again.findings == error.findings


def another_rate_on_rank_1(operator):
    operator.optimizer.param_groups[0]["lr"] *= 1 + operator.world_rank


def test_another_learning_rate_on_one_rank():
    error = found(DefaultLoop, another_rate_on_rank_1)
    assert error.code == "LS305"
    assert "`lr`" in str(error)


class NoisyGradients(DefaultLoop):
    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss)
        for parameter in self.model.parameters():
            parameter.grad += 0.1 * self.world_rank
        self.optimizer.step()
        return {"train_loss": loss.item()}


def test_gradients_that_are_changed_after_their_reduction_on_one_rank():
    error = found(NoisyGradients)
    assert error.code == "LS104"
    assert "lockstep reduced them" in str(error)
    lines = {place.line for place in error.findings[0].where}
    assert line_with("self.optimizer.step()", NoisyGradients.train_batch) in lines


class GoesRound(DefaultLoop):
    """A wrapper of its own, and a loss that goes round it."""

    def setup(self, config):
        self.wrapped = DistributedDataParallel(net()) if dist.is_initialized() else net()
        self.optimizer = sgd(self.wrapped)
        self.register(models=self.wrapped, optimizers=self.optimizer, criterion=nn.MSELoss())
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.wrapped.module.another_way(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


def test_a_way_round_a_wrapper_of_ones_own(caplog):
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        error = found(GoesRound, wrap_ddp=False)
    assert error.code == "LS101"
    assert "the forward did not go through the wrapper" in str(error)
    lines = {place.line for place in error.findings[0].where}
    assert line_with("another_way", GoesRound.train_batch) in lines
    said = [r.message for r in caplog.records if "your own wrapper's business" in r.message]
    assert len(said) == 1


class AllGathered(DefaultLoop):
    """A joint loss over rows that were gathered without a gradient."""

    joint_loss = True

    def compute_loss(self, batch, batch_info):
        own = self.model(batch[0][:5])
        rows = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, own)
        rows[self.world_rank] = own
        everything = torch.cat(rows)
        return nn.functional.cross_entropy(everything @ everything.T, torch.arange(len(everything)))


def test_a_loss_over_rows_that_were_gathered_without_gradient():
    error = found(AllGathered)
    assert error.code == "LS207"
    assert "dist.all_gather" in str(error)


class SameLoader(DefaultLoop):
    """Every rank reads the same batches, which is what it was told to do."""


def test_the_same_samples_on_every_rank_are_a_warning_and_said_once(caplog):
    with (
        caplog.at_level(logging.WARNING, logger="lockstep"),
        start(SameLoader, add_dist_sampler=False, wrap_ddp=True, audit="full") as trainer,
    ):
        for _ in range(3):
            trainer.train()
    assert sum("LS503" in r.getMessage() for r in caplog.records) == 1


# ------------------------------------------------------------------------------ what is right


WAYS = [
    pytest.param({"sync": sync}, id=sync, marks=[] if quick else [pytest.mark.slow])
    for sync, quick in (
        ("replicate", True),
        ("ddp", False),
        ("fsdp", False),
        ("parameter_server", False),
        ("data_parallel", False),
    )
]


@pytest.mark.parametrize("audit", [pytest.param("full", marks=pytest.mark.slow), "watch"])
@pytest.mark.parametrize(
    "arguments",
    [
        *WAYS,
        pytest.param({"reproducible": True, "num_shards": 4}, id="reproducible"),
        pytest.param(
            {"accumulate": 3, "clip_grad_norm": 0.1}, id="accumulate", marks=pytest.mark.slow
        ),
        pytest.param({"precision": "bf16"}, id="bf16", marks=pytest.mark.slow),
        pytest.param({"use_local": True}, id="use_local", marks=pytest.mark.slow),
    ],
)
def test_what_lockstep_does_itself_is_right_and_not_one_bit_is_another(arguments, audit, caplog):
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        digests = {_weights(mode, **arguments) for mode in ("off", audit)}
    assert len(digests) == 1
    assert caplog.records == []


def _weights(audit, **arguments):
    with start(DefaultLoop, audit=audit, **arguments) as trainer:
        trainer.train()
        trainer.train(num_steps=12)
        trainer.validate()
        state = trainer.get_model().state_dict()
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()


@pytest.mark.slow
def test_two_models_with_a_step_each_and_plain_backwards():
    with start(PlainBackward, audit="full") as trainer:
        trainer.train()
        assert trainer.verify().ok
        trainer.train()


# --------------------------------------------------------------------------- in whose process


def _hooks():
    return (
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        len(module._global_forward_pre_hooks),
        torch.autograd.backward,
        dist.all_reduce,
        DistributedDataParallel.__init__,
    )


class Looks(DefaultLoop):
    """Says whether something is hooked into torch while it trains."""

    def compute_loss(self, batch, batch_info):
        # The guard has one hook of its own.
        self.hooked = len(optimizer._global_optimizer_pre_hooks)
        return super().compute_loss(batch, batch_info)


@pytest.mark.other_workers
@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_stays_in_the_users_process(num_workers):
    before = _hooks()
    with start(Looks, num_workers, use_local=True, audit="full") as trainer:
        between = _hooks()[1:]
        trainer.train()
        hooked = trainer.get_local_operator().hooked
        assert _hooks()[1:] == between
    with start(Looks, num_workers, use_local=True, audit="off") as trainer:
        trainer.train()
        assert trainer.get_local_operator().hooked == hooked - 1
    assert between == before[1:]
    assert _hooks() == before


@pytest.mark.other_workers
def test_another_optimizer_of_the_users_process_is_nobodys_business():
    """It steps with gradients of its own while no call runs."""
    with start(DefaultLoop, use_local=True) as trainer:
        for _ in range(2):
            trainer.train()
            other = torch.nn.Linear(2, 2)
            step = torch.optim.SGD(other.parameters(), lr=0.1)
            other(torch.rand(3, 2)).sum().backward()
            step.step()
