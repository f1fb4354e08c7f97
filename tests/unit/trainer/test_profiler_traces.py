# SPDX-License-Identifier: Apache-2.0
"""A trace of torch's profiler, read back."""

import gzip
import json

import pytest
from tests.unit.trainer.test_early_stopping import start

from lockstep.errors import WrongTypeError
from lockstep.worker import torch_profiler


def test_a_trace_of_a_call(tmp_path):
    with start([1]) as trainer:
        result = trainer.train(num_steps=1, profile=tmp_path / "traces")
        assert result["profile"]["mean_fwd_s"] > 0
        trainer.train(num_steps=1)
        trainer.validate(profile=str(tmp_path / "traces"))
        with pytest.raises(WrongTypeError, match='profile="traces"'):
            trainer.train(profile=3)
    traces = {path.name: path for path in (tmp_path / "traces").iterdir()}
    assert set(traces) == {
        "train-step1-rank0.pt.trace.json.gz",
        "validate-step2-rank0.pt.trace.json.gz",
    }
    trace = json.loads(gzip.decompress(traces["train-step1-rank0.pt.trace.json.gz"].read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::linear", "aten::mse_loss"} <= names


def test_a_folder_that_cannot_be_made_costs_no_training(tmp_path):
    (tmp_path / "taken").write_text("")
    with start([1]) as trainer:
        with pytest.raises(FileExistsError):
            trainer.train(num_steps=1, profile=tmp_path / "taken")
        trainer.train(num_steps=1, profile=tmp_path / "traces")
    traces = [path.name for path in (tmp_path / "traces").iterdir()]
    assert traces == ["train-step1-rank0.pt.trace.json.gz"]


def test_an_error_does_not_wait_until_tracing_has_ended(tmp_path):
    """The workers may be in a forward that takes minutes: it ends with the next call."""
    with start([1], stumbles_at=1) as trainer:
        with pytest.raises(LookupError, match="once"):
            trainer.train(profile=tmp_path / "traces")
        # No call has come that would have to undo the failed one first.
        assert trainer._workers.failure is not None
        assert torch_profiler._running is not None
        assert trainer.status()["step"] == 1
        assert torch_profiler._running is None
        trainer.train(num_steps=1, profile=tmp_path / "traces")
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "train-step2-rank0.pt.trace.json.gz"


def test_tracing_ends_with_the_trainer(tmp_path):
    with start([1], fails=True) as trainer, pytest.raises(LookupError):
        trainer.train(profile=tmp_path / "traces")
    assert torch_profiler._running is None
