# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a trainer that is never there, because one of them cannot start."""

import pytest
from tests.unit.trainer.programs import trainer

from lockstep import Callback


class Diary(Callback):
    def __init__(self, fails=False):
        self.entries = []
        self.fails = fails

    def on_start(self, trainer):
        self.entries.append("start")
        if self.fails:
            raise LookupError("on purpose")

    def on_failure(self, trainer, error):
        self.entries.append(f"failure {error}")

    def on_shutdown(self, trainer):
        self.entries.append("shutdown")


def test_those_that_were_started_hear_that_a_later_one_cannot():
    """What they have begun (a run of a tracking server) has nobody else who ends it."""
    diaries = [Diary(), Diary(), Diary(fails=True), Diary()]
    with pytest.raises(LookupError, match="on purpose"):
        trainer(callbacks=diaries)
    told = ["start", "failure on purpose"]
    assert [each.entries for each in diaries] == [told, told, ["start"], []]
