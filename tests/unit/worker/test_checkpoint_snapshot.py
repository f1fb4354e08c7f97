# SPDX-License-Identifier: Apache-2.0
"""When a snapshot is due after a recovery, and what becomes of one that nobody has fetched."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tests.unit.trainer.programs import Regression, trainer

from lockstep.errors import NotAvailableError
from lockstep.worker.checkpoint_snapshot import SnapshotTaker
from lockstep.worker.snapshot import Snapshot


@pytest.mark.parametrize(
    ("committed", "last_known", "is_due"),
    [
        (13, 10, False),
        (13, 5, True),  # that of step 10 is missing
        (13, 0, True),
        (3, 0, False),
        (3, 10, False),  # `load` has led back to before the newest one
    ],
)
def test_one_that_the_driver_does_not_have_is_due_again(committed, last_known, is_due):
    operator = SimpleNamespace(_lockstep=SimpleNamespace(committed=committed))
    taker = SnapshotTaker(
        SimpleNamespace(operator=operator, spec=SimpleNamespace(checkpoint_every=5), rank=0)
    )
    taker.forget(last_known)
    assert taker._is_due == is_due


@pytest.mark.parametrize("keys", [(), ("local",)])
def test_one_of_all_ranks_is_refused_where_each_counts_its_own_steps(keys):
    spec = SimpleNamespace(
        checkpoint_every=5,
        num_workers=2,
        saves_parts=False,
        options=SimpleNamespace(add_dist_sampler=False),
    )
    operator = SimpleNamespace(_lockstep=SimpleNamespace(committed=0))
    taker = SnapshotTaker(SimpleNamespace(spec=spec, operator=operator, per_rank_keys=keys))
    with pytest.raises(NotAvailableError) if keys else nullcontext():
        taker.refuse_uncollectable_states()


@pytest.mark.parametrize("has_own_epoch", [False, True])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_none_is_taken_behind_a_call_that_ends_within_a_window_of_the_loop(
    has_own_epoch, has_stepped
):
    """The gradients would not be in it; only a `train_epoch` knows whether it keeps any."""
    operator = SimpleNamespace(
        _lockstep=SimpleNamespace(committed=5),
        _lockstep_overrides_loop=lambda: True,
    )
    spec = SimpleNamespace(checkpoint_every=5, num_workers=1, saves_parts=False)
    worker = SimpleNamespace(
        spec=spec,
        operator=operator,
        has_own_epoch=has_own_epoch,
        rank=0,
        call_number=0,
        state_dict=lambda _: {"global_step": 5},
    )
    taker = SnapshotTaker(worker)
    taker._counted_to = 0
    taker._has_seen_step = True  # of earlier calls
    taken = taker.after_call(SimpleNamespace(has_stepped=has_stepped))
    assert taken is (has_own_epoch or has_stepped)
    assert taker._is_due is not taken


class OwnBatch(Regression):
    """Steps behind every second batch."""

    def train_batch(self, batch, batch_info):
        features, targets = batch
        loss = self.criterion(self.model(features), targets)
        loss.backward()
        if self.global_step % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"train_loss": loss.item()}

    def state_dict(self):
        return 1

    def load_state_dict(self, state): ...


@pytest.mark.parametrize(("num_steps", "found"), [(2, [2]), (3, []), (4, [4])])
def test_one_is_written_behind_a_call_whose_last_batch_was_stepped(num_steps, found, tmp_path):
    """The end of a pass is no batch."""
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": num_steps}
    with trainer(OwnBatch, **arguments) as run:
        run.train(num_steps=num_steps)
        steps = [int(path.stem.split("-")[1]) for path in tmp_path.glob("*/step-*")]
        steps += [int(path.stem.split("-")[1]) for path in tmp_path.glob("step-*")]
        assert steps == found


class WritesWeights(Regression):
    """Steps no optimizer."""

    def train_batch(self, batch, batch_info):
        with torch.no_grad():
            self.model.weight.mul_(0.9)
        return {}


def test_one_is_written_behind_a_call_of_a_loop_that_steps_no_optimizer(tmp_path):
    with trainer(WritesWeights, checkpoint_dir=tmp_path, checkpoint_every=2) as run:
        run.train(num_steps=3)
        assert len([*tmp_path.glob("**/step-*3.ckpt")]) == 1


def test_one_that_nobody_has_fetched_is_dropped_and_its_memory_is_free():
    taker, freed = SnapshotTaker(SimpleNamespace()), []
    taker._keep(Snapshot(100, {"weight": 1}, SimpleNamespace(put_back=freed.append)))
    taker.drop()
    assert freed == [{"weight": 1}]
    assert taker.pop_latest() is None


@pytest.mark.parametrize(("rank", "is_handed_over"), [(0, True), (1, False)])
def test_a_worker_that_is_no_longer_rank_0_drops_the_one_that_nobody_has_fetched(
    rank, is_handed_over
):
    worker = SimpleNamespace(
        rank=0, operator=SimpleNamespace(_lockstep=SimpleNamespace(committed=103))
    )
    taker = SnapshotTaker(worker)
    taker._keep(Snapshot(100, {}))
    worker.rank = rank  # in a recovery that led to other ranks
    taker.forget(0)
    worker.rank = 0
    assert (taker.pop_latest() is not None) is is_handed_over
