# SPDX-License-Identifier: Apache-2.0
"""`lockstep.worker.state_dict`: a run that renames parameters is told that no state of it loads."""

import pytest
from torch import nn
from torch.nn.utils import parametrize, prune

from lockstep.errors import CheckpointError
from unit.trainer.programs import Regression, trainer


class ChangesLater(Regression):
    def train_epoch(self, batches, info):
        if self.config["is_later"]:
            self.config["change"](self.model)
        return super().train_epoch(batches, info)


def pruned(model):
    prune.l1_unstructured(model, "weight", 0.3)


def bounded(model):
    parametrize.register_parametrization(model, "weight", nn.Tanh(), unsafe=True)


def said(caplog):
    return [each.getMessage() for each in caplog.records if "since setup" in each.getMessage()]


@pytest.mark.parametrize("change", [pruned, bounded])
def test_what_a_state_would_need_is_said_when_it_is_made_and_loaded(change, caplog, tmp_path):
    with trainer(ChangesLater, config={"change": change, "is_later": True}) as run:
        run.train()
        run.save(tmp_path / "first")
        run.save(tmp_path / "second")
    (warning,) = said(caplog)
    assert "weight" in warning
    with (
        trainer(ChangesLater, config={"change": change, "is_later": True}) as again,
        pytest.raises(CheckpointError, match="in setup, before register"),
    ):
        again.load(tmp_path / "first")


def test_a_run_that_keeps_its_names_is_told_nothing(caplog, tmp_path):
    with trainer(ChangesLater, config={"change": pruned, "is_later": False}) as run:
        run.train()
        run.save(tmp_path / "first")
    assert not said(caplog)
