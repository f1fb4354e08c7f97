# SPDX-License-Identifier: Apache-2.0
"""What workers find of one another is known although the call does not come to its end."""

import json
import time
from dataclasses import replace

import pytest
from tests.unit.trainer.programs import Regression, trainer

from lockstep.operator.shadow import Shadow, ShadowCheck, WorkerPlace
from lockstep.trainer.shadow_summary import ShadowSummary

PLACE = WorkerPlace(0, 1, "host", "cpu")


class Shadowed(Regression):
    """A lone worker that notes two comparisons, and fails once."""

    def compute_loss(self, batch, batch_info):
        if self._lockstep.shadow is None:
            self._lockstep.shadow = Shadow(1, 3)  # later: at its start nobody could compare
        time.sleep(0.11)  # news of a worker in this process come every tenth of a second
        shadow, step = self._lockstep.shadow, batch_info["global_step"] + 1
        if step <= 2:
            shadow.checks.append(ShadowCheck(step, 0, (PLACE,) if step == 2 else (), "tensor"))
        if step == 4 and not hasattr(self, "has_failed"):
            self.has_failed = True
            raise ValueError("once")
        return super().compute_loss(batch, batch_info)


def logged(folder):
    lines = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
    return [line["shadow"]["step"] for line in lines if "shadow" in line]


def test_a_call_that_fails_tells_of_wrong_shards_and_the_next_one_of_the_others(tmp_path):
    with trainer(Shadowed, checkpoint_dir=tmp_path) as run:
        workers = run._workers
        workers.spec = replace(workers.spec, options=replace(workers.spec.options, shadow_every=1))
        with pytest.raises(ValueError, match="once"):
            run.train()
        assert [each["step"] for each in run.status()["shadow"]["wrong"]] == [2]
        assert logged(tmp_path) == [2]
        for _ in range(2):
            run.train(num_steps=1)
            found = run.status()["shadow"]
            assert (found["checked"], len(found["wrong"])) == (2, 1)
    assert logged(tmp_path) == [2]


def test_a_check_that_is_told_more_than_once_counts_once():
    summary = ShadowSummary()
    one, other = ShadowCheck(3, 0, (PLACE,), "tensor"), ShadowCheck(4, 1)
    for checks in ([one], [one], [one, other]):
        summary.take(checks)
    assert summary.checked == 2
    assert [each["step"] for each in summary.wrong] == [3]
