# SPDX-License-Identifier: Apache-2.0
"""States of another form, which what loads them converts: `lockstep.worker.state_refusals`."""

import pytest
import torch
import torch.distributed as dist
from tests.unit.trainer.programs import (
    NestedState,
    Regression,
    by_hand,
    linear,
    loader,
    same,
    sgd,
    trainer,
)
from tests.unit.trainer.programs import weights as weights_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep import TrainingOperator
from lockstep.errors import CheckpointError
from lockstep.sync.parameter_shards import as_shard
from lockstep.worker import load_parts


def _old(layer):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(layer)


class Normed(Regression):
    def setup(self, config):
        model = nn.Sequential(linear(), config["normed"](nn.Linear(2, 2, dtype=torch.float64)))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.fill_(0.5 + 0.1 * number)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=loader())


def _new(layer):
    return nn.utils.parametrizations.weight_norm(layer)


def test_a_state_of_the_weight_norm_of_before_goes_on_in_its_successor(tmp_path):
    with trainer(Normed, config={"normed": _old}) as run:
        run.train(num_steps=3)
        path = run.save(tmp_path / "old")
        run.train(num_steps=3)
        expected = weights_of(run.get_model())
    with trainer(Normed, config={"normed": _new}) as run:
        run.load(path)
        run.train(num_steps=3)
        assert same(weights_of(run.get_model()), expected)
    with trainer(Normed, config={"normed": _new}) as run:  # of the same form as well
        run.train(num_steps=6)
        state = run.state_dict()
        run.train(num_steps=1)
        run.load_state_dict(state)
        assert same(weights_of(run.get_model()), expected)


def test_what_is_outside_of_the_layer_that_converts_is_compared():
    with trainer(Normed, config={"normed": _old}) as run:
        state = run.state_dict()
    state["models"][0]["0.weigth"] = state["models"][0].pop("0.weight")
    refused = pytest.raises(CheckpointError, match=r"lacks '0\.weight'; .* has '0\.weigth'")
    with trainer(Normed, config={"normed": _new}) as run, refused as caught:
        run.load_state_dict(state)
    assert "weight_g" not in str(caught.value)


def test_what_the_layer_cannot_convert_changes_nothing():
    with trainer(Normed, config={"normed": _new}) as run:
        run.train(num_steps=1)
        state = run.state_dict()
        state["models"][0].pop("1.parametrizations.weight.original1")
        state["models"][0]["0.weight"] += 1.0
        run.train(num_steps=1)
        before = weights_of(run.get_model()).clone()
        with pytest.raises(CheckpointError, match=r"Missing key.*original1"):
            run.load_state_dict(state)
        assert torch.equal(weights_of(run.get_model()), before)


class Ramp(nn.Module):
    """A table of a fixed length, to which it stretches the table of a state."""

    def __init__(self, rows):
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, rows, dtype=torch.float64))

    def forward(self, features):
        return features + self.table.mean()

    def _load_from_state_dict(self, state, prefix, *rest):
        if len(state[prefix + "table"]) != len(self.table):
            _stretch(state, prefix + "table", len(self.table))
        super()._load_from_state_dict(state, prefix, *rest)


def _stretch(state, key, rows):
    stretched = nn.functional.interpolate(
        state[key][None, None], rows, mode="linear", align_corners=True
    )
    state[key] = stretched[0, 0]


class HookedRamp(Ramp):
    """As `Ramp`, by a hook that does not look at the present table."""

    def __init__(self, rows):
        super().__init__(rows)
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: _stretch(state, prefix + "table", rows)
        )

    _load_from_state_dict = nn.Module._load_from_state_dict


class Ramped(Regression):
    def setup(self, config):
        ramp, rows = config["ramp"]
        model = nn.Sequential(ramp(rows), linear())
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=loader())


@pytest.mark.parametrize("ramp", [Ramp, HookedRamp])
@pytest.mark.parametrize("sync", ["replicate", "fsdp"])
def test_a_module_converts_a_buffer_of_another_shape(sync, ramp):
    with trainer(Ramped, sync=sync, config={"ramp": (ramp, 3)}) as run:
        run.train(num_steps=2)
        state = run.state_dict()
    with trainer(Ramped, sync=sync, config={"ramp": (ramp, 5)}) as run:
        run.load_state_dict(state)
        assert run.get_model()[0].table.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
        run.train(num_steps=1)
        changed = weights_of(run.get_model())
    with trainer(Ramped, sync=sync, config={"ramp": (ramp, 3)}) as run:
        run.train(num_steps=3)  # the mean of the ramp is the same
        assert same(changed, weights_of(run.get_model()))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_weight_in_shards_is_not_renamed(mesh):
    """What a whole state has under another name stays whole."""
    layer = _new(nn.Linear(2, 2, dtype=torch.float64))
    for weight in (layer, layer.parametrizations.weight):
        for name, held in [*weight.named_parameters(recurse=False)]:
            setattr(weight, name, nn.Parameter(as_shard(held.data, held.data, mesh)))
    operator_cls = TrainingOperator.from_model(layer, optimizer=sgd(layer))
    state = {"optimizers": [sgd(layer).state_dict()]}
    of_same_form = {**state, "models": [_new(nn.Linear(2, 2, dtype=torch.float64)).state_dict()]}
    load_parts(operator_cls._lockstep_given.run, of_same_form)
    before = layer.parametrizations.weight.original1.full_tensor().clone()
    of_predecessor = {**state, "models": [_old(nn.Linear(2, 2, dtype=torch.float64)).state_dict()]}
    with pytest.raises(CheckpointError, match=r"mixed torch\.Tensor and DTensor"):
        load_parts(operator_cls._lockstep_given.run, of_predecessor)
    assert layer.parametrizations.weight.original1.full_tensor().equal(before)


class OfItsOwnForm(Regression):
    def setup(self, config):
        model = linear()
        optimizer = NestedState(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        self.register_data(train_loader=loader())


def test_an_optimizer_loads_its_state_in_the_form_in_which_it_has_saved_it(tmp_path):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "resume": "auto"}
    for _ in range(3):
        with trainer(OfItsOwnForm, **arguments) as run:
            run.train(num_steps=2)
            got = weights_of(run.get_model())
    assert same(got, by_hand(6))


class LacksMemory(nn.Linear):
    def _load_from_state_dict(self, *arguments):
        raise torch.OutOfMemoryError("no room for a conversion")


def test_a_lack_of_memory_is_not_called_a_state_that_does_not_fit():
    class Large(Regression):
        def setup(self, config):
            model = LacksMemory(2, 2, dtype=torch.float64)
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=sgd(model), criterion=nn.MSELoss()
            )
            self.register_data(train_loader=loader())

    with trainer(Large) as run, pytest.raises(torch.OutOfMemoryError, match="no room"):
        run.load_state_dict(run.state_dict())
