# SPDX-License-Identifier: Apache-2.0
"""Callbacks that stop early and keep the best, and what a failing run tells its callbacks."""

import json

import pytest
import torch
from tests.ray.operators import problem
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Callback, TorchTrainer, TrainingOperator
from lockstep.errors import CheckpointWriteError, ConfigurationError
from lockstep.trainer import EarlyStopping, KeepBest


class Told(TrainingOperator):
    """Its validation loss is what the config says, one value a call."""

    def setup(self, config):
        model = nn.Linear(5, 2, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.register(models=model, optimizers=optimizer, criterion=nn.MSELoss())
        data = TensorDataset(*problem())
        self.register_data(
            train_loader=DataLoader(data, 20), validation_loader=DataLoader(data, 20)
        )
        self.left = list(config["losses"])
        self.stumbles_at = config.get("stumbles_at")

    def validate(self, val_iterator, info):
        list(val_iterator)
        return {"val_loss": self.left.pop(0)}

    def compute_loss(self, batch, batch_info):
        if self.config.get("fails"):
            raise LookupError("on purpose")
        if batch_info["global_step"] == self.stumbles_at:
            self.stumbles_at = None
            raise LookupError("once")
        return super().compute_loss(batch, batch_info)


def start(losses, *callbacks, **config):
    return TorchTrainer(
        training_operator_cls=Told, config={"losses": losses, **config}, callbacks=callbacks
    )


def epochs_until_stop(losses, **arguments):
    stop = EarlyStopping("val_loss", **{"mode": "min", "patience": 2, **arguments})
    with start(losses, stop) as trainer:
        epochs = 0
        while not trainer.should_stop and epochs < len(losses):
            trainer.train(num_steps=1)
            trainer.validate()
            epochs += 1
        return epochs, stop.stop_reason


def test_stops_after_so_many_results_without_a_better_one():
    epochs, reason = epochs_until_stop([3, 2, 2.5, 1, 1, 4, 0])
    assert epochs == 6
    assert reason == "val_loss was 1 at its best, and no better in the 2 results since"
    assert epochs_until_stop([1, 2, 3, 3, 2, 9], mode="max")[0] == 5
    assert epochs_until_stop([3, 2.9, 2.8, 2.7], min_delta=0.5)[0] == 3
    assert epochs_until_stop([3, 2, 1]) == (3, None)
    assert epochs_until_stop([3, float("nan"), 1]) == (2, "val_loss is NaN")


def test_the_best_is_kept_and_a_run_that_goes_on_does_not_replace_it(tmp_path):
    best, last = tmp_path / "kept" / "best.pt", tmp_path / "last.pt"
    with start([3, 1, 2], KeepBest(best, "val_loss", mode="min")) as trainer:
        for _ in range(3):
            trainer.train(num_steps=1)
            trainer.validate()
        trainer.save(last)
    note = json.loads((tmp_path / "kept" / "best.pt.json").read_text())
    assert note == {
        "metric": "val_loss",
        "mode": "min",
        "value": 1.0,
        "step": 2,
        "of": "validate",
    }
    keep = KeepBest(best, "val_loss", mode="min")
    with start([1.5, 0.5], keep) as trainer:
        trainer.load(last)
        trainer.train(num_steps=1)
        trainer.validate()
        assert keep.best == 1.0
        with start([]) as other:
            other.load(best)
            assert other.state_dict()["global_step"] == 2
        trainer.validate()
        assert keep.best == 0.5
    anew = KeepBest(best, "val_loss", mode="min")
    with start([7], anew) as trainer:
        trainer.train(num_steps=1)
        trainer.validate()
        assert anew.best == 7.0


def test_a_run_that_begins_anew_replaces_the_best_also_after_a_call_that_failed(tmp_path):
    """The steps of that call count, and no callback was told of them."""
    path = tmp_path / "best.pt"
    with start([1], KeepBest(path, "val_loss", mode="min")) as trainer:
        trainer.train()
        trainer.validate()
    keep = KeepBest(path, "val_loss", mode="min")
    with start([7], keep, stumbles_at=1) as trainer:
        with pytest.raises(LookupError, match="once"):
            trainer.train()
        trainer.train()
        trainer.train()
        trainer.validate()
        assert keep.best == 7.0
        trainer.load(path)
        assert trainer.status()["step"] == 4


def test_a_metric_that_is_in_no_result():
    with start([1, 1], EarlyStopping("val_los", mode="min")) as trainer:
        trainer.train(num_steps=1)  # it could come with the validation
        with pytest.raises(ConfigurationError, match="did you mean 'val_loss'"):
            trainer.validate()
        with pytest.warns(UserWarning, match="never saw it"):
            trainer.shutdown()
    with start([], EarlyStopping("train_loss", mode="min")) as trainer:
        trainer.train(num_steps=1)
    with pytest.raises(ConfigurationError, match="mode cannot be 'least'"):
        EarlyStopping("val_loss", mode="least")


def test_a_metric_of_training_may_come_after_a_first_validation(tmp_path):
    stop = EarlyStopping("train_loss", mode="min")
    keep = KeepBest(tmp_path / "best.pt", "train_loss", mode="min")
    with start([1, 1], stop, keep) as trainer:
        trainer.validate()
        loss = trainer.train(num_steps=1)["train_loss"]
        trainer.validate()
        assert stop.best == keep.best == loss
    with start([1], EarlyStopping("trian_loss", mode="min")) as trainer:
        trainer.validate()
        with pytest.raises(ConfigurationError, match="did you mean 'train_loss'"):
            trainer.train(num_steps=1)
        with pytest.warns(UserWarning, match="never saw it"):
            trainer.shutdown()


class Both(Told):
    """Its training reports the metric of the validation, too, as a loss in `compute_loss` does."""

    def setup(self, config):
        super().setup(config)
        self.trained = list(config["trained"])

    def compute_loss(self, batch, batch_info):
        return super().compute_loss(batch, batch_info), {"val_loss": self.trained.pop(0)}


def start_both(trained, validated, *callbacks):
    config = {"trained": trained, "losses": validated}
    return TorchTrainer(training_operator_cls=Both, config=config, callbacks=callbacks)


def test_of_a_metric_of_both_the_validations_values_count(tmp_path):
    stop = EarlyStopping("val_loss", mode="min", patience=2)
    keep = KeepBest(tmp_path / "best.pt", "val_loss", mode="min")
    with start_both([0.2, 0.3, 0.1, 0.1, 0.1], [3, 2, 2.5, 2.2], stop, keep) as trainer:
        for patience_left in (0, 0, 1, 2):
            trainer.train(num_steps=1)
            assert not trainer.should_stop
            trainer.validate()
            assert stop.num_worse == patience_left
        assert (stop.best, keep.best) == (2.0, 2.0)
        assert stop.stop_reason.startswith("val_loss was 2 at its best")
        trainer.save(tmp_path / "last.pt")
    note = json.loads((tmp_path / "best.pt.json").read_text())
    assert (note["value"], note["step"]) == (2.0, 2)
    keep = KeepBest(tmp_path / "best.pt", "val_loss", mode="min")
    with start_both([0.1], [2.1], keep) as trainer:
        trainer.load(tmp_path / "last.pt")
        trainer.train(num_steps=1)  # better than any validation, and no reason to replace its best
        trainer.validate()
        assert keep.best == 2.0
    assert json.loads((tmp_path / "best.pt.json").read_text()) == note


def test_what_training_had_reported_before_the_first_validation_is_forgotten():
    stop = EarlyStopping("val_loss", mode="min", patience=1)
    with start_both([0.1, 0.2], [3, 2], stop) as trainer:
        trainer.train(num_steps=1)
        trainer.train(num_steps=1)
        assert trainer.should_stop  # by the only values that there are
        trainer.validate()
        trainer.validate()
        assert (stop.best, stop.num_worse, trainer.should_stop) == (2.0, 0, False)


class Diary(Callback):
    def __init__(self):
        self.entries = []

    def on_failure(self, trainer, error):
        self.entries.append(f"failure {error}")

    def on_shutdown(self, trainer):
        self.entries.append("shutdown")


def test_a_failure_is_told_once():
    in_user_code, in_worker, without_block = Diary(), Diary(), Diary()
    with pytest.raises(KeyError), start([], in_user_code):
        raise KeyError("mine")
    assert in_user_code.entries == ["failure 'mine'", "shutdown"]
    with pytest.raises(LookupError), start([], in_worker, fails=True) as trainer:
        trainer.train()
    assert in_worker.entries == ["failure on purpose"]
    trainer = start([], without_block, fails=True)
    with pytest.raises(LookupError):
        trainer.train()
    trainer.shutdown()
    trainer.shutdown()
    assert without_block.entries == ["failure on purpose"]


def test_callbacks_forget_an_earlier_trainer(tmp_path):
    """The second run is worse than the first, and is judged by itself."""
    stop = EarlyStopping("val_loss", mode="min", patience=1)
    best = KeepBest(tmp_path / "best.pt", "val_loss", mode="min")
    for losses in ([1.0, 2.0], [5.0, 4.0, 6.0]):
        with start(losses, stop, best) as trainer:
            while not trainer.should_stop:
                trainer.train(num_steps=1)
                trainer.validate()
            assert trainer.get_local_operator().left == []
    assert best.best == 4.0
    assert json.loads((tmp_path / "best.pt.json").read_text())["value"] == 4.0


@pytest.mark.parametrize("reduce_results", [True, False])
def test_a_best_state_that_cannot_be_saved_takes_no_result_away(tmp_path, reduce_results):
    best = KeepBest(tmp_path / "best.pt", "train_loss", mode="min")
    with start([], best) as trainer:
        best.path.mkdir()  # a folder is in the way
        with pytest.raises(CheckpointWriteError) as caught:
            trainer.train(num_steps=1, reduce_results=reduce_results)
        result = caught.value.result
        assert (result if reduce_results else result[0])["batch_count"] == 1
