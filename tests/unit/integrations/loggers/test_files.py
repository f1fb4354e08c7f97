# SPDX-License-Identifier: Apache-2.0
"""What a row of a file holds where a metric has a column's name, and where a logger is used twice.

The rows are those of `lockstep.integrations.loggers.base`.
"""

import csv
import json
import time

import pytest
import torch
from tests.unit.integrations.loggers.test_loggers import Regression

from lockstep import TorchTrainer
from lockstep.integrations.loggers import CSVLogger, JSONLinesLogger
from lockstep.keys import BATCH_SIZE

BOTH = pytest.mark.parametrize(
    ("logger", "name"), [(CSVLogger, "a.csv"), (JSONLinesLogger, "a.jsonl")]
)


class NamesColumns(Regression):
    """Its metrics have the names of a row's first columns."""

    def compute_loss(self, batch, batch_info):
        loss, _ = super().compute_loss(batch, batch_info)
        return loss, {"time": torch.tensor(0.25), "step": -7.0, "phase": 3.0}

    def validate_batch(self, batch, batch_info):
        return {**super().validate_batch(batch, batch_info), "epoch": 11.0}


def start(*callbacks, operator=Regression):
    return TorchTrainer(
        training_operator_cls=operator, config={"lr": 0.01, BATCH_SIZE: 10}, callbacks=callbacks
    )


def rows_of(path):
    """The rows of either kind of file, with the same keys and the same kinds of values."""
    with path.open(newline="") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file))
        return [{key: _as_cell(value) for key, value in json.loads(line).items()} for line in file]


def _as_cell(value):
    return "" if value is None else str(value)


@BOTH
def test_a_metric_with_a_columns_name_has_another_column(tmp_path, logger, name):
    path, began = tmp_path / name, time.time()
    with start(logger(path, every=2), operator=NamesColumns) as trainer:
        trainer.train(num_steps=2)
        trainer.validate()
    step, train, validation = rows_of(path)
    places = [(row["phase"], row["step"], row["epoch"]) for row in (step, train, validation)]
    assert places == [("step", "2", "1"), ("train", "2", "1"), ("validation", "2", "1")]
    for row in (step, train, validation):
        assert began <= float(row["time"]) <= time.time()
        assert (row["metric/time"], row["metric/step"]) == ("0.25", "-7.0")
        assert row["metric/phase"] == "3.0"
    assert validation["metric/epoch"] == "11.0"


@BOTH
@pytest.mark.parametrize("empties", [True, False])
def test_a_file_that_was_emptied_or_deleted_begins_anew(tmp_path, logger, name, empties):
    path = tmp_path / name
    both = logger(path)
    with start(both) as trainer:
        trainer.train(num_steps=1)
    path.write_text("") if empties else path.unlink()
    with start(both) as trainer:
        trainer.train(num_steps=2)
    assert [(row["phase"], row["step"]) for row in rows_of(path)] == [("train", "2")]


@BOTH
def test_a_validation_before_training_has_no_epoch_of_an_earlier_trainer(tmp_path, logger, name):
    path = tmp_path / name
    both = logger(path)
    for _ in range(2):
        with start(both) as trainer:
            trainer.validate()
            trainer.train(num_steps=1)
    assert [row["epoch"] for row in rows_of(path)] == ["", "1"] * 2
