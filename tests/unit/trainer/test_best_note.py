# SPDX-License-Identifier: Apache-2.0
"""The note beside the best state, and whose it is when a run goes on; with `KeepBest`.

See `lockstep.trainer.early_stopping` for what reads the note.
"""

import json
import os

import pytest
from tests.unit.trainer.test_early_stopping import Told

from lockstep import TorchTrainer
from lockstep.trainer import KeepBest


def start(losses, *callbacks, **arguments):
    return TorchTrainer(
        training_operator_cls=Told, config={"losses": losses}, callbacks=callbacks, **arguments
    )


def step_and_validate(trainer, times):
    for _ in range(times):
        trainer.train(num_steps=1)
        trainer.validate()


def keep_best(folder):
    return KeepBest(folder / "best.pt", "val_loss", mode="min")


def warnings_of(caplog):
    return [each.getMessage() for each in caplog.records if "best.pt" in each.getMessage()]


@pytest.mark.parametrize("torn", ["", '{"metric": "val_l', "[]", "{}", "null"])
def test_a_torn_note_counts_as_none(tmp_path, caplog, torn):
    with start([1.0], keep_best(tmp_path)) as trainer:
        step_and_validate(trainer, 1)
        trainer.save(tmp_path / "last.pt")
    note = tmp_path / "best.pt.json"
    note.write_text(torn)
    keep = keep_best(tmp_path)
    with start([2.0], keep) as trainer:
        trainer.load(tmp_path / "last.pt")
        step_and_validate(trainer, 1)
    assert keep.best == 2.0
    assert json.loads(note.read_text())["value"] == 2.0
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"{note} cannot be read")


def test_a_note_is_replaced_whole(tmp_path):
    """A second name of the file that held the first note still shows that note."""
    with start([2.0, 1.0], keep_best(tmp_path)) as trainer:
        step_and_validate(trainer, 1)
        os.link(tmp_path / "best.pt.json", tmp_path / "first.json")
        step_and_validate(trainer, 1)
    notes = [json.loads((tmp_path / name).read_text()) for name in ("first.json", "best.pt.json")]
    assert [(each["value"], each["step"]) for each in notes] == [(2.0, 1), (1.0, 2)]


def test_another_runs_best_is_no_reason_not_to_save(tmp_path, caplog):
    """Two runs begin with the same state from elsewhere, and keep their best at the same place."""
    with start([]) as trainer:
        trainer.train(num_steps=2)
        trainer.save(tmp_path / "pretrained.pt")
    for loss in (1.0, 1.5):
        keep = keep_best(tmp_path)
        with start([loss], keep) as trainer:
            trainer.load(tmp_path / "pretrained.pt")
            step_and_validate(trainer, 1)
        assert keep.best == loss
    (warning,) = warnings_of(caplog)
    assert "(val_loss=1 at step 3) is not of this run, which goes on from step 2" in warning


def test_a_run_that_resumes_from_its_own_directory_keeps_a_best_behind_its_checkpoint(
    tmp_path, caplog
):
    arguments = {"checkpoint_dir": tmp_path / "run", "checkpoint_every": 2}
    with start([3.0, 2.0, 1.0], keep_best(tmp_path), **arguments) as trainer:
        step_and_validate(trainer, 3)
    keep = keep_best(tmp_path)
    with start([1.5], keep, resume="auto", **arguments) as trainer:
        assert trainer.status()["step"] == 2
        step_and_validate(trainer, 1)
    assert keep.best == 1.0
    assert warnings_of(caplog) == []


def test_a_best_that_a_run_goes_on_without_is_set_aside(tmp_path):
    with start([0.1], keep_best(tmp_path)) as trainer:
        trainer.train(num_steps=2)
        trainer.save(tmp_path / "last.pt")
        step_and_validate(trainer, 1)
    kept = (tmp_path / "best.pt").read_bytes()
    with start([0.3], keep_best(tmp_path)) as trainer:
        trainer.load(tmp_path / "last.pt")
        step_and_validate(trainer, 1)
    assert (tmp_path / "set-aside-best.pt").read_bytes() == kept
    for name, value in (("set-aside-best.pt.json", 0.1), ("best.pt.json", 0.3)):
        assert json.loads((tmp_path / name).read_text())["value"] == value
