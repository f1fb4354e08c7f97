# SPDX-License-Identifier: Apache-2.0
"""The output of each logger, read back with the real package.

The rows of `lockstep.integrations.loggers.base` in `lockstep.integrations.loggers.files`,
`lockstep.integrations.loggers.tensorboard` and `lockstep.integrations.loggers.mlflow`.
"""

import csv
import json

import pytest
import torch
from tests.ray.operators import problem
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import ConfigurationError
from lockstep.integrations.loggers import (
    CSVLogger,
    JSONLinesLogger,
    MLflowLogger,
    TensorBoardLogger,
)
from lockstep.keys import BATCH_SIZE


class Regression(TrainingOperator):
    def setup(self, config):
        model = nn.Linear(5, 2, dtype=torch.float64)
        self.register(
            models=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=config["lr"]),
            criterion=nn.MSELoss(),
        )
        loader = DataLoader(TensorDataset(*problem()), config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)

    def compute_loss(self, batch, batch_info):
        loss = super().compute_loss(batch, batch_info)
        return loss, {"diverged": torch.tensor(float("nan")), "note": "a", "rows": batch[0][0]}


CUT_OFF = '{"time": 1.5, "ph'


def start(*callbacks):
    return TorchTrainer(
        training_operator_cls=Regression,
        config={"lr": 0.01, BATCH_SIZE: 10, "inner": {"depth": 2}},
        callbacks=callbacks,
    )


def run(*callbacks, path=None, resume=False):
    """An epoch of four steps, validation, two steps."""
    with start(*callbacks) as trainer:
        if resume:
            trainer.load(path)
        results = trainer.train(profile=True), trainer.validate(), trainer.train(num_steps=2)
        if path is not None:
            trainer.save(path)
    return results


def test_csv_grows_by_rows_and_by_columns(tmp_path):
    path = tmp_path / "logs" / "run.csv"
    train, validation, _ = run(CSVLogger(path), path=tmp_path / "run.pt")
    run(CSVLogger(path), path=tmp_path / "run.pt", resume=True)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["phase"], row["step"], row["epoch"]) for row in rows] == [
        ("train", "4", "1"),
        ("validation", "4", "1"),
        ("train", "6", "2"),
        ("train", "8", "2"),
        ("validation", "8", "2"),
        ("train", "10", "3"),
    ]
    assert float(rows[0]["train_loss"]) == train["train_loss"]
    assert float(rows[1]["val_loss"]) == validation["val_loss"]
    assert (rows[0]["val_loss"], rows[1]["train_loss"]) == ("", "")
    assert float(rows[0]["profile/mean_fwd_s"]) > 0
    assert (rows[0]["diverged"], rows[0]["note"]) == ("nan", "a")
    assert "rows" not in rows[0]


def steps_of(path):
    lines = [line for line in path.read_text().splitlines() if line != CUT_OFF]
    rows = csv.DictReader(lines) if ".csv" in path.name else map(json.loads, lines)
    # Each block of rows that was moved has a line of its own with the columns.
    return [(row["phase"], int(row["step"])) for row in rows if row["step"] != "step"]


@pytest.mark.parametrize(("logger", "name"), [(CSVLogger, "a.csv"), (JSONLinesLogger, "a.jsonl")])
def test_rows_behind_the_checkpoint_are_there_once(tmp_path, logger, name):
    """Two programs are killed: three steps, and none, behind the checkpoint of step 2."""
    path, aside, state = tmp_path / name, tmp_path / f"{name}.superseded", tmp_path / "run.pt"
    with start(logger(path)) as trainer:  # another run before it, of which all rows stay
        trainer.train()
    with start(logger(path, every=1)) as trainer:
        trainer.train(num_steps=2)
        trainer.save(state)
        trainer.train(num_steps=2)
        trainer.validate()
        trainer.train(num_steps=1)
    if logger is JSONLinesLogger:
        with path.open("a") as file:
            file.write(CUT_OFF)
    kept = [("train", 4), ("step", 1), ("step", 2), ("train", 2)]
    again = [("step", 3), ("step", 4), ("train", 4)]
    validated = [("validation", 2)]
    for number in (1, 2):
        with start(logger(path, every=1)) as trainer:
            trainer.load(state)
            trainer.validate()
            assert aside.exists() == (number == 2)  # it may end here
            trainer.train(num_steps=2)
        assert steps_of(path) == kept + number * validated + again
    moved = [*again, ("validation", 4), ("step", 5), ("train", 5)]
    assert steps_of(aside)[: len(moved)] == moved


def test_a_run_that_begins_anew_moves_no_row(tmp_path):
    for _ in range(2):
        run(CSVLogger(path := tmp_path / "run.csv"))
    assert steps_of(path) == [("train", 4), ("validation", 4), ("train", 6)] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["run.csv"]


def test_csv_leaves_foreign_files_alone(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigurationError, match="another path"):
        start(CSVLogger(path))
    assert path.read_text() == "a,b\n1,2\n"


def test_json_lines(tmp_path):
    path = tmp_path / "run.jsonl"
    train, *_ = run(JSONLinesLogger(path))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 4, 6]
    assert rows[0]["train_loss"] == train["train_loss"]
    assert rows[0]["diverged"] == "NaN"
    assert rows[0]["num_samples"] == 37


def test_tensorboard_reads_the_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, folder = tmp_path / "run.pt", tmp_path / "board"
    train, validation, _ = run(TensorBoardLogger(folder), path=path)
    with start(TensorBoardLogger(folder)) as trainer:
        trainer.load(path)
        trainer.train(num_steps=1)
    events = EventAccumulator(str(folder)).Reload()
    curve = events.Scalars("train/train_loss")
    assert [event.step for event in curve] == [4, 6, 7]
    assert curve[0].value == pytest.approx(train["train_loss"], rel=1e-6)
    assert events.Scalars("validation/val_loss")[0].value == pytest.approx(validation["val_loss"])
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "|lr|0.01|" in text
    assert "|inner/depth|2|" in text


def test_mlflow_reads_the_run(tmp_path, monkeypatch):
    # The client alone has no database; its store of files asks for this.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    uri = (tmp_path / "mlruns").as_uri()
    logger = MLflowLogger("digits", tracking_uri=uri, run_name="first")
    train, *_ = run(logger)
    client = mlflow.MlflowClient(uri)
    found = client.get_run(logger.run_id)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "first"
    assert found.data.params == {"lr": "0.01", "batch_size": "10", "inner/depth": "2"}
    curve = client.get_metric_history(logger.run_id, "train_loss")
    assert next((each.step, each.value) for each in curve) == (4, train["train_loss"])
    assert [each.step for each in curve] == [4, 6]
    assert mlflow.active_run() is None
    again = MLflowLogger(tracking_uri=uri, run_id=logger.run_id)
    with pytest.raises(KeyError), start(again):
        raise KeyError
    assert client.get_run(logger.run_id).info.status == "FAILED"
