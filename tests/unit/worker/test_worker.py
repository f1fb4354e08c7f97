# SPDX-License-Identifier: Apache-2.0
"""A worker builds its operator, and hooks what has to look at an optimizer's steps, in order."""

import re
from pathlib import Path

import pytest
import torch
from tests.unit.trainer.programs import Regression, trainer
from torch.optim import optimizer as optimizers

from lockstep.errors import NonFiniteError

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"


class WithOwnBatch(Regression):
    """Has every hook: a loop method of its own, and `after_step`."""

    stepped = 0

    def after_step(self):
        self.stepped += 1

    def train_batch(self, batch, batch_info):
        return super().train_batch(batch, batch_info)


def modules_on_page(heading):
    section = PAGE.read_text().split("## The hooks around an optimizer's step", 1)[1]
    listed = section.split(heading, 1)[1].split("\n\n")[1]
    names = re.findall(r"^- `([\w.]+)\.\w+`", listed, re.MULTILINE)
    return [f"lockstep.{module}" for module in names]


def test_hooks_on_a_step_come_in_the_order_of_the_architecture_page():
    with trainer(WithOwnBatch, check_finite=True) as one:
        one.train(num_steps=1)
        hooks = one._workers._engine._worker.step_hooks
        before = [*optimizers._global_optimizer_pre_hooks.values(), *hooks._before]
        after = hooks._after
    assert [hook.__module__ for hook in before] == modules_on_page("Before the step:")
    assert [hook.__module__ for hook in after] == modules_on_page("After it:")


def test_a_step_that_a_hook_refuses_is_not_seen_by_later_ones():
    class Diverges(WithOwnBatch):
        def compute_loss(self, batch, batch_info):
            return super().compute_loss(batch, batch_info) * torch.inf

    with trainer(Diverges, check_finite=True) as one:
        with pytest.raises(NonFiniteError):
            one.train(num_steps=1)
        assert one.get_local_operator().stepped == 0


class NotesWhatIsCounted(Regression):
    worker = None

    def compute_loss(self, batch, batch_info):
        if self.worker is not None:
            run = self.worker.loop_run
            self.counted.append(None if run.counted is None else run.counted.samples)
            run._counted_at = 0.0  # as if a quarter of a second had passed
        return super().compute_loss(batch, batch_info)


def test_counts_for_the_driver_are_those_of_whole_windows():
    """After a death in a window the other workers compute all of its batches again."""
    with trainer(NotesWhatIsCounted, accumulate=2) as one:
        one.train()
        operator = one.get_local_operator()
        operator.worker, operator.counted = one._workers._engine._worker, []
        one.train()
        operator.worker = None
        assert operator.counted == [None, None, 12, 12]  # batches have 6 samples
