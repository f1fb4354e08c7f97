# SPDX-License-Identifier: Apache-2.0
"""Which of MLflow's runs a logger writes to, with which parameters, and how the run ends."""

import pytest
from tests.unit.integrations.loggers.test_loggers import Regression

from lockstep import Callback, TorchTrainer
from lockstep.integrations.loggers import MLflowLogger
from lockstep.keys import BATCH_SIZE


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The URI of a store, and a client of it."""
    # The client alone has no database; its store of files asks for this.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    uri = (tmp_path / "mlruns").as_uri()
    return uri, mlflow.MlflowClient(uri)


def train(*callbacks, **config):
    with TorchTrainer(
        training_operator_cls=Regression,
        config={"lr": 0.01, BATCH_SIZE: 10, **config},
        callbacks=callbacks,
    ) as trainer:
        trainer.train(num_steps=1)


def num_values(client, run_id):
    return len(client.get_metric_history(run_id, "train_loss"))


def test_each_trainer_has_a_run_of_its_own(store):
    uri, client = store
    logger = MLflowLogger(tracking_uri=uri)
    train(logger)
    first = logger.run_id
    train(logger, lr=0.02)
    assert logger.run_id != first
    assert [num_values(client, each) for each in (first, logger.run_id)] == [1, 1]
    assert client.get_run(first).data.params["lr"] == "0.01"
    assert client.get_run(logger.run_id).data.params["lr"] == "0.02"


def test_a_run_that_is_resumed_keeps_its_parameters_and_gets_new_ones(store, caplog):
    uri, client = store
    logger = MLflowLogger(tracking_uri=uri)
    train(logger)
    assert not caplog.records
    again = MLflowLogger(tracking_uri=uri, run_id=logger.run_id)
    train(again, lr=0.02, depth=3)
    params = client.get_run(logger.run_id).data.params
    assert params == {"lr": "0.01", "batch_size": "10", "depth": "3"}
    (warning,) = [each.getMessage() for each in caplog.records if "MLflow" in each.getMessage()]
    assert "goes on with lr=0.02, and keeps its parameter lr=0.01" in warning
    train(again)
    assert again.run_id == logger.run_id
    assert num_values(client, logger.run_id) == 3


class CannotStart(Callback):
    def on_start(self, trainer):
        raise LookupError("on purpose")


def test_a_run_fails_where_a_later_callback_cannot_start(store):
    uri, client = store
    logger = MLflowLogger(tracking_uri=uri)
    with pytest.raises(LookupError, match="on purpose"):
        train(logger, CannotStart())
    assert client.get_run(logger.run_id).info.status == "FAILED"
