# SPDX-License-Identifier: Apache-2.0
"""Accumulation, clipping and reproducible sums in the default loop, against plain autograd.

`lockstep.operator.default_loops` with ``accumulate``, ``clip_grad_norm`` and ``reproducible``.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import GradientNotReducedError
from lockstep.keys import BATCH_SIZE

SAMPLES, BATCH = 37, 5


def problem():
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64),
        torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64),
    )


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Regression(TrainingOperator):
    def setup(self, config):
        self.model, self.optimizer, self.criterion = self.register(
            models=(model := net()), optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))


def one_process(accumulate, epochs=2, clip=None):
    """The mean over all samples of a window, whatever batches it was cut into."""
    features, targets = problem()
    model = net()
    optimizer = sgd(model)
    for _ in range(epochs):
        for start in range(0, SAMPLES, BATCH * accumulate):
            rows = slice(start, start + BATCH * accumulate)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(features[rows]), targets[rows]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model


def trained(calls=(None, None), **arguments):
    defaults = {"training_operator_cls": Regression, "config": {BATCH_SIZE: BATCH}}
    with TorchTrainer(**defaults | arguments) as trainer:
        for steps in calls:
            trainer.train(num_steps=steps)
        return trainer.get_model()


def assert_equal_weights(model, other):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


# 37 samples are 8 batches, the last of 2: windows of 3 end with a short one of 2 batches.
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("accumulate", [1, 3, 8])
def test_a_window_is_one_mean_over_its_samples(accumulate, num_shards, reproducible):
    model = trained(num_shards=num_shards, accumulate=accumulate, reproducible=reproducible)
    assert_equal_weights(model, one_process(accumulate))


def test_a_call_may_end_in_the_middle_of_a_window():
    model = trained(calls=(4, 1, 2, 9), accumulate=3)
    assert_equal_weights(model, one_process(3))


def test_a_state_saved_in_a_window_goes_on_from_its_start(tmp_path):
    arguments = {"training_operator_cls": Regression, "config": {BATCH_SIZE: BATCH}}
    with TorchTrainer(**arguments, accumulate=3) as trainer:
        trainer.train(num_steps=5)
        path = trainer.save(tmp_path / "state.pt")
        trainer.train(num_steps=2)
        trainer.load(path)  # drops what the open window held
        trainer.train()
        trainer.train()
        assert_equal_weights(trainer.get_model(), one_process(3))
    with TorchTrainer(**arguments, accumulate=3) as trainer:
        trainer.load(path)
        assert trainer.state_dict()["global_step"] == 3
        trainer.train()
        trainer.train()
        assert_equal_weights(trainer.get_model(), one_process(3))


class Poisoned(Regression):
    """Its own part of a state fails once everything else has been taken over."""

    def state_dict(self):
        return {"poison": False}

    def load_state_dict(self, state):
        if state["poison"]:
            raise ValueError("poison")


def test_a_load_that_fails_in_a_window_counts_none_of_its_batches_again():
    with TorchTrainer(
        training_operator_cls=Poisoned, config={BATCH_SIZE: BATCH}, accumulate=3
    ) as trainer:
        trainer.train(num_steps=5)
        with pytest.raises(ValueError, match="poison"):
            trainer.load_state_dict({**trainer.state_dict(), "operator": {"poison": True}})
        result = trainer.train(num_steps=3)
        trainer.train()
        assert_equal_weights(trainer.get_model(), one_process(3))
    assert result["num_samples"] == SAMPLES - 5 * BATCH


class Normalised(TrainingOperator):
    def setup(self, config):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        self.register(models=model, optimizers=sgd(model), criterion=nn.MSELoss())
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))


def test_running_statistics_count_no_batch_twice_in_a_state_saved_in_a_window():
    def trainer():
        return TorchTrainer(
            training_operator_cls=Normalised, config={BATCH_SIZE: BATCH}, accumulate=3
        )

    with trainer() as undisturbed:
        undisturbed.train(num_steps=6)
        expected = undisturbed.get_model()[1].state_dict()
    with trainer() as stopped:
        stopped.train(num_steps=5)
        state = stopped.state_dict()
        assert stopped.get_model()[1].num_batches_tracked == 5
    with trainer() as resumed:
        resumed.load_state_dict(state)
        assert resumed.status()["step"] == 3
        resumed.train(num_steps=3)
        got = resumed.get_model()[1].state_dict()
    assert got["num_batches_tracked"] == 6
    torch.testing.assert_close(got["running_mean"], expected["running_mean"])
    torch.testing.assert_close(got["running_var"], expected["running_var"])


def test_a_state_of_other_windows_begins_a_new_one():
    """Saved at step 2, which is the middle of a window where three batches make one."""
    arguments = {"training_operator_cls": Regression, "config": {BATCH_SIZE: BATCH}}
    with TorchTrainer(**arguments, accumulate=2) as trainer:
        trainer.train(num_steps=2)
        state = trainer.state_dict()
    ends = []
    # The gradients of no earlier step, and of no open window, may come into the next one.
    for earlier_steps in (None, 1, 3):
        with TorchTrainer(**arguments, accumulate=3) as trainer:
            if earlier_steps is not None:
                trainer.train(num_steps=earlier_steps)
            trainer.load_state_dict(state)
            assert trainer.state_dict()["position"]["train"]["step"] == 2
            assert trainer.state_dict()["global_step"] == 2
            trainer.train(num_steps=2)
            assert trainer.state_dict()["position"]["train"]["step"] == 3
            trainer.train()
            ends.append(trainer.get_model())
    assert_equal_weights(ends[1], ends[0])
    assert_equal_weights(ends[2], ends[0])


class Stream(IterableDataset):
    """Of a length that nobody knows."""

    def __iter__(self):
        return zip(*problem(), strict=True)


class Streamed(Regression):
    def setup(self, config):
        super().setup(config)
        self.register_data(train_loader=DataLoader(Stream(), config[BATCH_SIZE]))


def test_a_short_last_window_is_not_computed_again():
    """Eight batches make windows of 3, 3 and 2; whoever saves then has stepped three times."""
    arguments = {"training_operator_cls": Streamed, "config": {BATCH_SIZE: BATCH}}
    with TorchTrainer(**arguments, accumulate=3) as trainer:
        trainer.train(num_steps=8)
        state = trainer.state_dict()
    assert state["global_step"] == 8
    with TorchTrainer(**arguments, accumulate=3) as trainer:
        trainer.load_state_dict(state)
        trainer.train(num_steps=8)
        assert_equal_weights(trainer.get_model(), one_process(3))


def test_clipping_bounds_the_norm_of_the_global_gradient():
    assert_equal_weights(trained(num_shards=3, clip_grad_norm=0.05), one_process(1, clip=0.05))
    assert_equal_weights(
        trained(num_shards=3, clip_grad_norm=0.05, accumulate=3), one_process(3, clip=0.05)
    )


class ByHand(Regression):
    """Windows of three batches, the last of two, in a loop of one's own."""

    def train_epoch(self, iterator, info):
        for index, (features, targets) in enumerate(iterator):
            if index % 3 == 0:
                self.optimizer.zero_grad()
            loss = self.criterion(self.model(features), targets)
            if index % 3 == 2 or index == 7:
                self.backward(loss)
                self.optimizer.step()
            else:
                with self.no_sync():
                    self.backward(loss)
        return {}


def test_a_window_made_by_hand_is_one_mean_over_its_samples():
    with TorchTrainer(training_operator_cls=ByHand, config={BATCH_SIZE: BATCH}) as trainer:
        trainer.train()
        trainer.train()
        assert_equal_weights(trainer.get_model(), one_process(3))


class OwnLoop(Regression):
    def train_batch(self, batch, batch_info):
        return {}


class Joint(Regression):
    joint_loss = True


@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        (OwnLoop, {"accumulate": 2}, "self.no_sync"),
        (Regression, {"accumulate": 2, "wrap_ddp": False}, "accumulate=2 needs"),
        (OwnLoop, {"clip_grad_norm": 1.0}, "clip_grad_norm_"),
        (OwnLoop, {"reproducible": True}, "override compute_loss"),
        (Joint, {"reproducible": True}, "joint loss"),
        (Regression, {"accumulate": 0}, "1 or more"),
        (Regression, {"clip_grad_norm": -1.0}, "positive norm"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(operator, arguments, message):
    with pytest.raises(ValueError, match=message):
        TorchTrainer(training_operator_cls=operator, config={BATCH_SIZE: 4}, **arguments)


class ZeroesInItsLoss(Regression):
    """A step begins in `compute_loss`, as in a loop of one's own in one process."""

    def compute_loss(self, batch, batch_info):
        self.optimizer.zero_grad(set_to_none=self.config["set_to_none"])
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        return super().compute_loss(batch, batch_info)


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize(("num_shards", "accumulate"), [(1, 1), (1, 3), (4, 1), (4, 3)])
def test_a_loss_sees_no_gradients_of_other_shards(
    num_shards, accumulate, set_to_none, reproducible
):
    model = trained(
        training_operator_cls=ZeroesInItsLoss,
        config={BATCH_SIZE: BATCH, "set_to_none": set_to_none},
        num_shards=num_shards,
        accumulate=accumulate,
        reproducible=reproducible,
    )
    assert_equal_weights(model, one_process(accumulate))


def test_verify_sees_none_either():
    with TorchTrainer(
        training_operator_cls=ZeroesInItsLoss,
        config={BATCH_SIZE: BATCH, "set_to_none": True},
        num_shards=4,
        accumulate=3,
    ) as trainer:
        assert trainer.verify().ok


class ZeroesBetweenBatches(Regression):
    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        return super().train_batch(batch, batch_info)


class AssignsZeros(Regression):
    def compute_loss(self, batch, batch_info):
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return super().compute_loss(batch, batch_info)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [(ZeroesBetweenBatches, {"accumulate": 3}), (AssignsZeros, {"num_shards": 4})],
)
def test_a_window_of_the_default_loop_is_not_the_programs_to_give_up(operator, arguments):
    with pytest.raises(GradientNotReducedError, match="LS101"):
        trained(training_operator_cls=operator, **arguments)


class DropsItsWindow(Regression):
    """A window of its own, which it gives up by zeroing it."""

    def train_batch(self, batch, batch_info):
        features, targets = batch
        with self.no_sync():
            self.backward(5 * self.criterion(self.model(features), targets))
        self.optimizer.zero_grad()
        self.backward(self.criterion(self.model(features), targets))
        self.optimizer.step()
        return {}


def test_a_window_of_ones_own_is():
    assert_equal_weights(trained(training_operator_cls=DropsItsWindow), one_process(1))


class HeadOnly(Regression):
    """Its optimizer leaves out layers that have gradients all the same."""

    def setup(self, config):
        self.model = net()
        self.optimizer, self.criterion = sgd(self.model[2]), nn.MSELoss()
        self.register(models=self.model, optimizers=self.optimizer, criterion=self.criterion)
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))


@pytest.mark.parametrize(("num_shards", "precision"), [(1, "fp32"), (3, "fp32"), (3, "fp16")])
def test_gradients_that_no_optimizer_uses_do_not_add_up(num_shards, precision):
    """Their sum would be part of the norm, and the head's steps would become shorter."""
    features, targets = problem()
    model = net()
    optimizer = sgd(model[2])
    for start in range(0, SAMPLES, BATCH):
        rows = slice(start, start + BATCH)
        model.zero_grad()
        nn.functional.mse_loss(model(features[rows]), targets[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    arguments = {"training_operator_cls": HeadOnly, "num_shards": num_shards, "clip_grad_norm": 0.5}
    arguments["precision"] = precision
    assert_equal_weights(trained(calls=(3, 5), **arguments), model)
    with TorchTrainer(config={BATCH_SIZE: BATCH}, **arguments) as trainer:
        trainer.train(num_steps=3)
        state = trainer.state_dict()
    with TorchTrainer(config={BATCH_SIZE: BATCH}, **arguments) as trainer:
        trainer.load_state_dict(state)
        trainer.train()
        assert_equal_weights(trainer.get_model(), model)


SEQUENCES = [torch.arange(3.0 * n, dtype=torch.float64).reshape(n, 3) / n for n in (3, 2, 9, 7)]


def line():
    model = nn.Linear(3, 1, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    return model


class TimeMajor(TrainingOperator):
    """Batches of shape (time steps, samples, 3), as `pad_sequence` makes them."""

    def setup(self, config):
        self.model, self.optimizer = self.register(models=(model := line()), optimizers=sgd(model))
        loader = DataLoader(SEQUENCES, 2, collate_fn=nn.utils.rnn.pad_sequence)
        self.register_data(train_loader=loader)

    def compute_loss(self, batch, batch_info):
        return (self.model(batch.sum(0)) - 1).square().mean()


class TimeMajorMoved(TimeMajor):
    def train_batch(self, batch, batch_info):
        return super().train_batch(self.to_device(batch).clone(), batch_info)


@pytest.mark.parametrize("operator", [TimeMajor, TimeMajorMoved])
def test_a_time_major_batch_counts_its_samples_also_once_it_was_moved(operator):
    with TorchTrainer(training_operator_cls=operator, accumulate=2) as trainer:
        assert trainer.train()["num_samples"] == len(SEQUENCES)
        trained = trainer.get_model()
    model = line()
    optimizer = sgd(model)
    sums = torch.stack([sequence.sum(0) for sequence in SEQUENCES])
    (model(sums) - 1).square().mean().backward()
    optimizer.step()
    assert_equal_weights(trained, model)


class BackwardInside(Regression):
    def compute_loss(self, batch, batch_info):
        loss = super().compute_loss(batch, batch_info)
        loss.backward(retain_graph=True)
        return loss


def test_a_backward_inside_compute_loss_is_refused_where_the_order_counts():
    with (
        TorchTrainer(
            training_operator_cls=BackwardInside, config={BATCH_SIZE: 4}, reproducible=True
        ) as trainer,
        pytest.raises(RuntimeError, match="the default loop runs backward"),
    ):
        trainer.train()


class Kept(Regression):
    """What a window keeps from its beginning: buffers, a state of the user's own, and all weights
    in the first steps."""

    scale = 1.0

    def setup(self, config):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=sgd(model), criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*problem()), config[BATCH_SIZE]))
        self.fails = False

    def compute_loss(self, batch, batch_info):
        if self.fails:
            self.fails = False
            raise LookupError("once")
        self.scale += 0.01
        return self.scale * self.criterion(self.model(batch[0]), batch[1])

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]


@torch.no_grad()
def change(operator):
    operator.scale = 3.0
    operator.model[0].running_mean.fill_(7.0)
    operator.model[1].weight.fill_(0.5)


def everything_in(trainer):
    state = trainer.state_dict()
    return [*state["models"][0].values(), torch.tensor(state["operator"]["scale"])]


@pytest.mark.parametrize("then", ["trains", "loads", "fails"])
@pytest.mark.parametrize("windows", [0, 4])
def test_what_is_changed_within_a_window_is_kept(windows, then):
    """It changes the state from which the window's batches are computed, those before it again."""
    arguments = {"training_operator_cls": Kept, "config": {BATCH_SIZE: 2}, "accumulate": 3}
    begun = 3 * windows
    with TorchTrainer(**arguments) as trainer:
        if windows:
            trainer.train(num_steps=begun)
        trainer.apply_all_operators(change)
        trainer.train(num_steps=6)
        expected = everything_in(trainer)
    with TorchTrainer(**arguments) as trainer:
        trainer.train(num_steps=begun + 2)
        trainer.apply_all_operators(change)
        assert trainer.state_dict()["operator"] == {"scale": 3.0}
        if then == "loads":
            trainer.load_state_dict(trainer.state_dict())
        if then == "fails":
            trainer.get_local_operator().fails = True
            with pytest.raises(LookupError, match="once"):
                trainer.train(num_steps=4)
        rest = begun + 6 - trainer.status()["step"] if then == "loads" else 4
        assert trainer.train(num_steps=rest)["batch_count"] == rest
        assert trainer.status()["step"] == begun + 6
        for got, wanted in zip(everything_in(trainer), expected, strict=True):
            assert torch.equal(got, wanted)
