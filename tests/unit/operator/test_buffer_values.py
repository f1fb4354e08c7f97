# SPDX-License-Identifier: Apache-2.0
"""Buffers that a forward fills, replaces or registers, in a worker whose `setup` made others."""

import copy

import pytest
import torch
from tests.unit.trainer.programs import Regression, linear, loader, sgd, trainer
from torch import nn

import lockstep
from lockstep import TrainingOperator
from lockstep.errors import CheckpointError
from lockstep.operator.buffer_values import (
    buffer_kinds,
    buffer_values,
    load_module,
    put_buffer_values,
    with_own_local_buffers,
)
from lockstep.sync.local_parameters import mark_copies
from lockstep.worker import load_parts
from lockstep.worker.state_dict import copy_own_rows


class Parts:
    """What the functions ask of a run."""

    averages = ()

    def __init__(self, *modules):
        self.modules = modules

    def plain_modules(self):
        return self.modules


class Scales(nn.Module):
    """Its buffers follow the largest batch that it has seen."""

    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.register_buffer("scale", None)
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.register_buffer("seen", torch.zeros(1))

    def see(self):
        self.inner(torch.arange(6.0).view(2, 3))
        self.scale, self.table, self.seen = torch.tensor(2.0), torch.ones(4), torch.full((3,), 5.0)
        self.inner.register_buffer("late", torch.tensor([7.0]), persistent=False)
        self.register_buffer("added", torch.tensor([8.0]))
        return self


def held(module):
    return dict(module.named_buffers())


@pytest.mark.parametrize("copy", [None, copy_own_rows])
def test_of_a_worker_that_has_trained_in_one_that_has_not(copy):
    trained, fresh = Scales().see(), Scales()
    values = buffer_values(Parts(trained), *([] if copy is None else [copy]))
    put_buffer_values(Parts(fresh), values, torch.device("cpu"))
    assert held(fresh).keys() == held(trained).keys()
    for name, value in held(trained).items():
        assert torch.equal(held(fresh)[name], value)
        assert held(fresh)[name].data_ptr() != value.data_ptr()
    fresh.load_state_dict(trained.state_dict())
    assert "inner.late" not in fresh.state_dict()


def test_of_a_worker_that_has_not_trained_in_one_that_has():
    trained, fresh = Scales().see(), Scales()
    put_buffer_values(Parts(trained), buffer_values(Parts(fresh)), torch.device("cpu"))
    assert trained.scale is None
    assert trained.table.shape == trained.seen.shape == (1,)
    trained.load_state_dict(fresh.state_dict())


def test_modules_that_share_a_buffer_and_views_of_one_go_on_sharing():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("whole", torch.zeros(4))
            self.register_buffer("part", self.whole[:2])
            self.register_buffer("one", torch.zeros(1))
            self.inner = nn.Module()
            self.inner.register_buffer("same", self.one)

    here, there = Shares(), Shares()
    there.whole.add_(1)
    there.one = there.inner.same = torch.ones(3)
    put_buffer_values(Parts(here), buffer_values(Parts(there)), torch.device("cpu"))
    here.whole[0] = 5.0
    assert here.part.tolist() == [5.0, 1.0]
    assert here.inner.same is here.one
    assert here.one.tolist() == [1.0, 1.0, 1.0]


def test_an_expanded_buffer_becomes_what_a_forward_has_put_there():
    here, there = nn.Module(), nn.Module()
    for module in (here, there):
        module.register_buffer("mask", torch.zeros(1).expand(4), persistent=False)
    there.mask = torch.arange(4.0)
    put_buffer_values(Parts(here), buffer_values(Parts(there)), torch.device("cpu"))
    assert here.mask.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_rank_keeps_what_is_its_own():
    here, there = Scales().see(), Scales().see()
    lockstep.local(here.table)
    there.table, there.seen = torch.ones(1), torch.ones(1)
    values = with_own_local_buffers(buffer_values(Parts(there)), Parts(here))
    put_buffer_values(Parts(here), values, torch.device("cpu"))
    assert (len(here.table), len(here.seen)) == (4, 1)


def test_a_rank_keeps_what_its_forwards_have_put_in_the_place_of_its_own():
    here, there = Scales(), Scales().see()
    lockstep.local(here.table)
    mark_copies([here])
    here.see()
    here.table = torch.full((2,), 3.0)
    values = with_own_local_buffers(buffer_values(Parts(there)), Parts(here))
    put_buffer_values(Parts(here), values, torch.device("cpu"))
    assert here.table.tolist() == [3.0, 3.0]


def test_of_a_module_that_is_not_here_the_load_tells():
    trained, fresh = Scales(), Scales()
    trained.added = nn.BatchNorm1d(3)
    put_buffer_values(Parts(fresh), buffer_values(Parts(trained)), torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"added\.running_mean"):
        fresh.load_state_dict(trained.state_dict())


class FillsItsScale(Regression):
    """Its first forward fills one buffer, and its largest batch enlarges another one."""

    def setup(self, config):
        super().setup(config)
        self.model.register_buffer("scale", None)
        self.model.register_buffer("sizes", torch.ones(1, dtype=torch.float64))
        self.model.register_forward_pre_hook(_fill)


def _fill(module, given):
    if module.scale is None:
        module.scale = torch.full((2,), 3.0, dtype=torch.float64)
    if len(module.sizes) < len(given[0]):
        module.sizes = torch.ones(len(given[0]), dtype=torch.float64)
    return given[0] / module.scale.mean()


def test_a_run_with_such_buffers_is_verified_and_goes_on_from_a_checkpoint(tmp_path):
    with trainer(FillsItsScale) as run:
        run.train(num_steps=2)
        assert run.verify(num_steps=2).ok
        path = run.save(tmp_path / "filled")
        run.train()
        expected = run.get_model().weight
    with trainer(FillsItsScale) as run:
        run.load(path)
        run.train()
        assert torch.equal(run.get_model().weight, expected)


class Registers(FillsItsScale):
    """Its first forward registers a buffer besides, which a state of before has not."""

    def register(self, **parts):
        return super().register(**parts, ema=self.config.get("ema"))[:3]

    def setup(self, config):
        super().setup(config)
        self.model.register_forward_pre_hook(_register)


def _register(module, given):
    if not hasattr(module, "added"):
        module.register_buffer("added", torch.full((1,), 2.0, dtype=torch.float64))
    return given[0] / module.added


@pytest.mark.parametrize("config", [{}, {"ema": 0.5}])
def test_a_restart_goes_on_from_a_checkpoint_with_buffers_that_a_forward_has_made(tmp_path, config):
    with trainer(Registers, config=config) as run:
        run.train(num_steps=6)
        expected = run.state_dict()
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": 2, "resume": "auto"}
    for step in (2, 4, 6):
        with trainer(Registers, config=config, **arguments) as run:
            assert run.status()["step"] == step - 2
            run.train(num_steps=2)
            got = run.state_dict()
    for key in ("models", "ema"):
        for mine, theirs in zip(got.get(key, ()), expected.get(key, ()), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


class Centres(Regression):
    """Its forward keeps a running mean, which begins as an integer."""

    def setup(self, config):
        super().setup(config)
        self.model.register_buffer("mean", torch.tensor(0))
        self.model.register_forward_pre_hook(_centre)


def _centre(module, given):
    if module.training:
        module.mean = 0.9 * module.mean + 0.1 * given[0].mean()
    return given[0] - module.mean


def test_a_buffer_of_which_a_forward_has_changed_the_dtype_goes_on_from_a_checkpoint(tmp_path):
    with trainer(Centres) as run:
        run.train(num_steps=3)
        path = run.save(tmp_path / "saved")
        run.train(num_steps=2)
        expected = run.get_model().state_dict()
    assert expected["mean"].dtype is torch.float64
    with trainer(Centres) as run:
        run.load(path)
        run.train(num_steps=2)
        got = run.get_model().state_dict()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


class Rounded(Regression):
    """The weights are of another precision than the buffer that its forward enlarges."""

    def setup(self, config):
        model = nn.Linear(3, 2, dtype=config["dtype"])
        model.register_buffer("table", torch.zeros(0, dtype=config["dtype"]))
        model.register_forward_pre_hook(_grow)
        self.register(models=model, optimizers=sgd(model), criterion=nn.MSELoss())
        self.register_data(train_loader=loader())

    def compute_loss(self, batch, batch_info):
        (model,) = self._lockstep.registered.models
        return model(batch[0].to(model.weight.dtype)).square().mean()


def _grow(module, given):
    if len(module.table) < len(given[0]):
        module.table = torch.ones(len(given[0]), dtype=module.weight.dtype)
    return given[0] * module.table[: len(given[0]), None]


def test_a_buffer_that_has_grown_gets_the_dtype_of_a_program_of_another_precision():
    with trainer(Rounded, config={"dtype": torch.float32}) as run:
        run.train(num_steps=1)
        state = run.state_dict()
    with trainer(Rounded, config={"dtype": torch.bfloat16}) as run:
        run.load_state_dict(state)
        assert run.get_model().table.dtype is torch.bfloat16
        run.train(num_steps=1)


def test_a_load_leads_back_to_before_the_forward_that_made_them():
    with trainer(Registers) as run:
        before = run.state_dict()
        run.train(num_steps=2)
        expected = run.state_dict()["models"][0]
        run.load_state_dict(before)
        model = run.get_local_operator().model
        assert model.scale is None
        assert not hasattr(model, "added")
        assert model.sizes.shape == (1,)
        run.train(num_steps=2)
        got = run.state_dict()["models"][0]
        assert all(torch.equal(got[name], value) for name, value in expected.items())


class Other(Regression):
    """With a table that `setup` makes, of a size from its config."""

    def setup(self, config):
        super().setup(config)
        size = config.get("size")
        if size is not None:
            self.model.register_buffer("table", torch.ones(size))


@pytest.mark.parametrize(
    ("there", "here", "named"),
    [
        (4, 3, r"'table' has shape \(4,\) there, \(3,\) here"),
        (None, 3, "lacks 'table'"),
        (3, None, "has 'table', unknown here"),
    ],
)
def test_buffers_that_setup_has_made_have_to_be_the_same(there, here, named):
    with trainer(Other, config={"size": there}) as run:
        run.train(num_steps=1)
        state = run.state_dict()
    refused = pytest.raises(CheckpointError, match=named)
    with trainer(Other, config={"size": here}) as run, refused:
        run.load_state_dict(state)


def test_a_buffer_of_a_module_that_is_not_here_is_refused():
    with trainer() as run:
        state = run.state_dict()
        state["models"][0]["inner.added"] = torch.ones(1)
        state["buffers_since_setup"] = {"models.0": ["inner.added"]}
        with pytest.raises(CheckpointError, match=r"has 'inner\.added', unknown here"):
            run.load_state_dict(state)


def test_an_instance_that_was_given_gets_the_buffers_of_its_copies():
    model, criterion = linear(), nn.Module()
    operator = TrainingOperator.from_model(model, optimizer=sgd(model), criterion=criterion)
    trained, state = copy.deepcopy(model), {}
    trained.register_buffer("added", torch.ones(2))
    with trainer() as run:
        run.train(num_steps=1)
        state = {**run.state_dict(), "models": [trained.state_dict()], "criterion": {}}
    state["buffers_since_setup"] = {"models.0": ["added"]}
    load_parts(operator._lockstep_given.run, state)
    assert torch.equal(model.added, trained.added)
    load_parts(operator._lockstep_given.run, state)
    with trainer() as run:  # a load of a state of before
        state = {**run.state_dict(), "criterion": {}}
    load_parts(operator._lockstep_given.run, state)
    assert not hasattr(model, "added")


class RefusesItsState(Regression):
    """Its first forward fills a buffer, and it loads nothing that another one has saved."""

    def setup(self, config):
        super().setup(config)
        self.model.register_buffer("scale", None)
        self.model.register_forward_pre_hook(_fill_scale)

    def state_dict(self):
        return self.config["name"]

    def load_state_dict(self, state):
        if state != self.config["name"]:
            raise ValueError("not this one")


def _fill_scale(module, given):
    if module.scale is None:
        module.scale = torch.full((2,), 3.0, dtype=torch.float64)


def test_a_load_that_fails_leaves_buffers_as_they_were():
    with trainer(RefusesItsState, config={"name": "one"}) as run:
        run.train(num_steps=2)
        state = run.state_dict()
    with trainer(RefusesItsState, config={"name": "other"}) as run:
        before = run.get_model().state_dict()
        with pytest.raises(ValueError, match="not this one"):
            run.load_state_dict(state)
        assert run.get_local_operator().model.scale is None
        after = run.get_model().state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], value) for key, value in before.items())
        run.train(num_steps=1)


@pytest.mark.parametrize("rows", [2, 6])
def test_a_state_whose_buffer_nobody_has_changed_does_not_go_in_the_place_of_one_that_has_grown(
    rows,
):
    """It is of another program, with a table of another length."""
    module = nn.Module()
    module.register_buffer("table", torch.zeros(4))
    first = buffer_kinds(module)
    for held in (4, 8):
        module.table = torch.zeros(held)
        with pytest.raises(RuntimeError, match="size mismatch for table"):
            load_module(module, {"table": torch.ones(rows)}, first=first, changed=set())
        assert len(module.table) == held
        load_module(module, {"table": torch.ones(4)}, first=first, changed=set())
        assert module.table.tolist() == [1.0] * 4


def test_a_load_of_a_table_of_another_program_is_refused_behind_a_forward_as_well():
    with trainer(FillsItsScale) as run:
        state = run.state_dict()
        state["models"][0]["sizes"] = torch.ones(2, dtype=torch.float64)
        run.train(num_steps=2)
        before = run.state_dict()["models"][0]
        with pytest.raises(CheckpointError, match="size mismatch for sizes"):
            run.load_state_dict(state)
        after = run.state_dict()["models"][0]
        assert all(torch.equal(after[name], value) for name, value in before.items())
