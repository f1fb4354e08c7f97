# SPDX-License-Identifier: Apache-2.0
"""``TorchTrainer(sync="fsdp")`` with ``register(shard=...)``: no worker ever holds all layers."""

import os
import signal
import tempfile

import pytest
import torch
from tests.procs.odd_optimizers import Lookahead
from tests.ray.operators import (
    GLOBAL_BATCH,
    STEPS,
    DefaultLoop,
    Net,
    farthest,
    net,
    one_process,
    problem,
    sgd,
)
from tests.torch_versions import needs_unit_hooks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, checkpoint
from lockstep.errors import CheckpointError, ConfigurationError, NotAvailableError
from lockstep.keys import BATCH_SIZE

pytestmark = [needs_unit_hooks, pytest.mark.timeout(240)]  # some start processes six times


class InUnits(DefaultLoop):
    """Every layer is a unit."""

    def setup(self, config):
        model = net()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=sgd(model),
            criterion=nn.MSELoss(),
            shard=config.get("shard", [nn.Linear]),
            ema=config.get("ema"),
        )
        loader = DataLoader(TensorDataset(*problem()), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)


class Within(InUnits):
    """An optimizer has another one within it, and both have stepped before they are registered."""

    def setup(self, config):
        model, (features, targets) = net(), problem()
        optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.05))
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(features), targets).backward()
            optimizer.step()
        optimizer.zero_grad()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss(), shard=config["shard"]
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))


class MeasuresItsWeights(InUnits):
    def compute_loss(self, batch, batch_info):
        norm = self.model.first.weight.norm().detach()
        return super().compute_loss(batch, batch_info), {"norm": norm}


class OwnValidation(InUnits):
    def validate(self, val_iterator, info):
        return {"seen": float(sum(1 for _ in val_iterator))}


def trainer(operator=InUnits, config=None, **arguments):
    return TorchTrainer(
        training_operator_cls=operator,
        config={BATCH_SIZE: GLOBAL_BATCH, **(config or {})},
        sync="fsdp",
        **arguments,
    )


def rows_held(operator):
    weight = operator.model.first.weight
    return tuple(weight.to_local().shape), tuple(
        operator.optimizer.state[weight]["momentum_buffer"].to_local().shape
    )


@pytest.mark.other_workers
def test_the_weights_of_one_process_and_a_state_that_goes_on_anywhere(tmp_path):
    # 37 samples in batches of 12: the last batch of an epoch has one sample, for rank 0.
    with trainer(num_workers=3) as run:
        assert run.status()["units"] == ["first", "second", "model"]
        run.train(num_steps=STEPS - 4)
        assert run.validate()["num_samples"] == 37
        path = run.save(tmp_path / "state")
        run.train(num_steps=4)
        trained = run.get_model()
        held = run.apply_all_operators(rows_held)
        run.apply_all_operators(lambda operator: setattr(operator.model, "temperature", 0.5))
        named = run.get_model()
        features = problem()[0]
        predicted = torch.stack(run.predict(DataLoader(TensorDataset(features), 4)))
    assert type(trained) is Net
    assert named.temperature == 0.5
    assert vars(named).keys() - {"temperature"} == vars(net()).keys()
    assert farthest(trained, one_process()) < 1e-12
    assert (predicted - trained(features)).abs().max() < 1e-12
    # Each rank has written its own rows.
    assert {f"__{rank}_0.distcp" for rank in range(3)} < set(os.listdir(path))
    # Neither of the weights nor of the momentum does a rank hold more than its rows.
    assert held == [((3, 5), (3, 5)), ((3, 5), (3, 5)), ((1, 5), (1, 5))]
    with trainer(num_workers=2, num_shards=3) as other:
        other.load(path)
        other.train(num_steps=4)
        assert farthest(other.get_model(), trained) < 1e-12
    with TorchTrainer(
        training_operator_cls=InUnits, config={BATCH_SIZE: GLOBAL_BATCH}, num_shards=3
    ) as alone:
        alone.load(path)
        alone.train(num_steps=4)
        assert farthest(alone.get_model(), trained) < 1e-12


def test_a_norm_of_weights_as_a_metric_is_that_of_the_whole():
    """Also with the last batch of an epoch, of which one worker has no sample."""
    with trainer(MeasuresItsWeights) as alone:
        expected = alone.train()["norm"]
    with trainer(MeasuresItsWeights, num_workers=2, num_shards=3) as run:
        assert run.train()["norm"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_accumulated_and_clipped_and_held_against_one_process():
    with trainer(num_workers=2, accumulate=2, clip_grad_norm=0.05, audit="full") as run:
        run.train()
        assert run.verify().ok


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoints(tmp_path):
    arguments = {"num_workers": 2, "checkpoint_dir": tmp_path, "checkpoint_every": 2}
    with trainer(**arguments) as run:
        run.train(num_steps=6)
        trained = run.get_model()
    with trainer(**arguments, resume="auto") as again:
        assert again.status()["step"] == 6
        assert farthest(again.get_model(), trained) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["whole", [nn.Linear]], ids=["whole", "in units"])
def test_an_optimizer_within_another_one_brings_its_state(shard, tmp_path):
    config = {"shard": shard}
    with trainer(Within, config, num_workers=2) as run:
        run.train(num_steps=4)
        path = run.save(tmp_path / "state")
        run.train(num_steps=4)
        trained = run.get_model()
        assert run.verify(num_steps=2).ok
    with trainer(Within, config, num_workers=2) as again:
        again.load(path)
        (inner,) = again.state_dict()["inner_optimizers"]
        assert inner["state"][0]["exp_avg"].shape == (7, 5)
        again.train(num_steps=4)
        assert farthest(again.get_model(), trained) == 0.0
    with trainer(Within, config, num_workers=1) as alone:
        alone.train(num_steps=8)
        assert farthest(alone.get_model(), trained) < 1e-9


class OnAnotherHost(InUnits):
    """The second worker sees no file below `config["hidden"]`, as on a host of its own."""

    def setup(self, config):
        super().setup(config)
        if self.world_rank == 1:
            tempfile.tempdir = str(config["temporary"])
            for name in ("isdir", "isfile"):
                hide(name, str(config["hidden"]))

    def state_dict(self):
        return {"rank": self.world_rank}

    def load_state_dict(self, state):
        self.loaded = state["rank"]


def hide(name, folder):
    see = getattr(os.path, name)
    setattr(os.path, name, lambda path: not str(path).startswith(folder) and see(path))


def test_parts_travel_where_a_host_does_not_see_the_folder(tmp_path):
    temporary, hidden = tmp_path / "temporary", tmp_path / "hidden"
    temporary.mkdir()
    config = {"temporary": temporary, "hidden": hidden}
    with trainer(OnAnotherHost, config, num_workers=2) as run:
        run.train(num_steps=5)
        path = run.save(hidden / "state")
        trained = run.get_model()
    assert not os.listdir(temporary)
    with trainer(OnAnotherHost, config, num_workers=2) as again:
        again.load(path)
        assert again.status()["step"] == 5
        assert farthest(again.get_model(), trained) == 0.0
        assert again.apply_all_operators(lambda operator: operator.loaded) == [0, 1]
        again.train(num_steps=STEPS - 5)
        assert farthest(again.get_model(), one_process()) < 1e-12


def test_a_state_in_units_is_loaded_where_weights_are_whole_and_back(tmp_path):
    with trainer(num_workers=2) as run:
        run.train(num_steps=5)
        path = run.save(tmp_path / "units")
        trained = run.get_model()
    with trainer(config={"shard": "whole"}, num_workers=2) as whole:
        whole.load(path)
        assert farthest(whole.get_model(), trained) == 0.0
        whole.train(num_steps=STEPS - 5)
        back = whole.save(tmp_path / "whole")
    with trainer(num_workers=2) as again:
        again.load(back)
        assert farthest(again.get_model(), one_process()) < 1e-12


def test_a_load_that_failed_leaves_nothing_for_the_next_one(tmp_path):
    temporary, hidden = tmp_path / "temporary", tmp_path / "hidden"
    temporary.mkdir()
    config = {"temporary": temporary, "hidden": hidden}
    with trainer(OnAnotherHost, config, num_workers=2) as run:
        run.train(num_steps=2)
        early = run.save(tmp_path / "seen")
        before = run.get_model()
        run.train(num_steps=3)
        state = checkpoint.open_checkpoint(run.save(hidden / "state"))
        state["optimizers"] = []  # of another run: refused when the parts are there
        with pytest.raises(CheckpointError):
            run.load_state_dict(state)
        run.load(early)
        assert farthest(run.get_model(), before) == 0.0


class DiesWhileItWrites(InUnits):
    """The second worker is killed in the middle of its first part of a checkpoint."""

    def setup(self, config):
        super().setup(config)
        if self.world_rank == 1:
            write_part, died = checkpoint.write_part, config["died"]

            def die_once(*arguments):
                if not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return write_part(*arguments)

            checkpoint.write_part = die_once


@pytest.mark.slow
def test_a_worker_dies_while_it_writes_its_part_and_all_write_again(tmp_path):
    config = {"died": tmp_path / "died"}
    with trainer(DiesWhileItWrites, config, num_workers=2, spare_workers=1) as run:
        run.train(num_steps=5)
        path = run.save(tmp_path / "state")
        assert len(run.status()["recoveries"]) == 1
        trained = run.get_model()
    assert sorted(os.listdir(tmp_path)) == ["died", "state"]
    with trainer(num_workers=2) as again:
        again.load(path)
        assert farthest(again.get_model(), trained) == 0.0


@pytest.mark.parametrize(
    ("operator", "config", "options", "error", "words"),
    [
        (InUnits, {"ema": 0.9}, {}, NotAvailableError, "ema"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (InUnits, {}, {"precision": "fp16"}, NotAvailableError, "fp16"),
                (OwnValidation, {}, {}, NotAvailableError, "validate"),
                (InUnits, {"shard": "halves"}, {}, ConfigurationError, "halves"),
                (InUnits, {"shard": [nn.Conv2d]}, {}, ConfigurationError, "no submodule"),
            )
        ),
    ],
)
def test_what_cannot_be_right_is_refused_at_the_start(operator, config, options, error, words):
    with pytest.raises(error, match=words):
        trainer(operator, config, num_workers=2, **options)
