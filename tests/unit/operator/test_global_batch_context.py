# SPDX-License-Identifier: Apache-2.0
"""The weight, the shards and the reduction of one global batch, without a run around it."""

import pytest
import torch

from lockstep import reduction_context
from lockstep.errors import WeightError
from lockstep.group import Group
from lockstep.keys import NUM_SAMPLES
from lockstep.operator.global_batch_context import GlobalBatchContext
from lockstep.operator.read_ahead_batches import ReadAheadBatches
from lockstep.operator.shard_batch import ShardBatch
from lockstep.reduction_context import ReductionContext

ROWS = torch.arange(6.0).reshape(3, 2)


def step(*shards, is_joint=False, **further):
    return GlobalBatchContext(
        ReductionContext(Group(None), averages=False), "train", shards, is_joint, **further
    )


def reading_ahead(*read):
    """The context of the last of the batches that were `read`, of which none was trained on."""
    ahead = ReadAheadBatches(lambda: "rank 1, step 3")
    for each in read:
        ahead.note_read(each, progress=0)
    return step(read[-1], is_joint=True, read_ahead=ahead), ahead


def test_the_default_loop_gets_the_shards_of_the_context_itself():
    first, second = ShardBatch(ROWS, 3, seed=1), ShardBatch(ROWS[:1], 1, seed=2, shard=1)
    context = step(first, second)
    assert context.shards_in(context) == (first, second)
    assert context.joint_batch is None
    assert not context.is_borrowed


def test_a_plain_batch_is_one_shard():
    delivered = ShardBatch(ROWS, 3, seed=1)
    context = step(delivered, is_joint=True)
    assert context.shards_in(ROWS) == (delivered,)
    (cut,) = context.shards_in(ROWS[:2])
    assert (cut.num_samples, cut.seed) == (2, 1)


def test_only_the_first_plain_batch_of_a_step_has_the_seed_that_was_delivered():
    """Further ones would all draw the same numbers, and so would the loop behind each of them."""
    context, seeds = step(ShardBatch(ROWS, 3, seed=1), is_joint=True), []
    for _ in range(3):
        (cut,) = context.shards_in(ROWS[:2])
        seeds.append(cut.seed)
        with context.activate_shard(cut, per_shard=False):
            pass
    assert seeds == [1, None, None]
    (behind,) = context.between_batches().shards_in(ROWS)
    assert behind.seed is None


def test_a_batch_that_was_only_moved_keeps_the_samples_that_were_delivered():
    """Its leading length may be anything: here two samples of three time steps."""
    delivered = ShardBatch(ROWS, 2, seed=1, shard=4)
    context = step(delivered, is_joint=True)
    (moved,) = context.shards_in(ROWS.clone())
    assert (moved.num_samples, moved.seed, moved.shard) == (2, 1, 4)
    (rebuilt,) = context.shards_in((ROWS.double(), torch.tensor([3, 1])))
    assert rebuilt.num_samples == 2


def test_a_batch_whose_samples_cannot_be_counted_is_not_cut():
    context = step(ShardBatch(ROWS, 2, seed=1), is_joint=True)
    with pytest.raises(WeightError, match=r"each of the 2 samples .*\n.* leading lengths \[3\]"):
        context.shards_in(ROWS[:, :1])
    (shorter,) = context.shards_in(ROWS[:1])  # one time step of both
    assert shorter.num_samples == 2


@pytest.mark.parametrize("made_from", [lambda batch: batch, lambda batch: batch * 2])
def test_whatever_is_made_from_a_borrowed_batch_has_no_samples(made_from):
    context = step(ShardBatch(ROWS, 0, seed=1), is_joint=True)
    (shard,) = context.shards_in(made_from(ROWS))
    assert shard.num_samples == 0
    assert context.num_samples_of({NUM_SAMPLES: 3}) == 0
    assert context.weight_of_backward(5.0) == 0


def test_a_batch_that_no_worker_delivered_counts_its_rows():
    (shard,) = step().shards_in(ROWS)
    assert shard.num_samples == 3


def test_samples_of_a_batch_are_those_delivered_unless_its_metrics_say_others():
    context = step(ShardBatch(ROWS, 3, seed=1), is_joint=True)
    assert context.num_samples_of({}) == 3
    assert context.num_samples_of({NUM_SAMPLES: 7}) == 7


def test_inside_the_computation_of_a_shard_its_weight_and_seed_hold():
    shard = ShardBatch(ROWS, 3, seed=11)
    context = step(shard)
    with context.activate_shard(shard, per_shard=True) as reduction:
        drawn = torch.rand(1)
        assert reduction_context.active() is reduction
        assert (reduction.weight, reduction.per_shard, reduction.averages) == (3, True, False)
    assert context.reduction.weight is None
    with context.activate_shard(shard, per_shard=False):
        assert torch.equal(drawn, torch.rand(1))


def test_inside_the_computation_of_a_borrowed_batch_this_rank_has_no_samples():
    context = step(ShardBatch(ROWS, 0, seed=1), is_joint=True)
    for shard, is_borrowed in ((context.shards[0], True), (ShardBatch(ROWS, 3, seed=1), False)):
        with context.activate_shard(shard, per_shard=False) as reduction:
            assert reduction.is_borrowed == is_borrowed
    assert not context.reduction.is_borrowed


def test_between_two_batches_nothing_of_the_step_is_left():
    context = step(ShardBatch(ROWS, 3, seed=1), is_joint=True, closes_window=False)
    context.num_train_batch_calls, context.has_scheduled = 1, True
    after = context.between_batches()
    assert (after.joint_batch, after.num_train_batch_calls, after.has_scheduled) == (None, 0, False)
    assert after.closes_window is False
    assert after.weight_of_backward(None) is None


def test_a_backward_whose_batch_is_unknown_is_refused():
    context = step(ShardBatch(ROWS, 3, seed=1), is_joint=True, weight=WeightError("unknown"))
    with pytest.raises(WeightError, match="unknown"):
        context.weight_of_backward(None)


def test_a_backward_in_a_loop_that_reads_ahead_is_noted():
    first = ShardBatch(ROWS, 3, seed=1)
    context, ahead = reading_ahead(first)
    assert context.weight_of_backward(None) == 3
    ahead.note_read(ShardBatch(ROWS[:2], 2, seed=2), progress=0)
    # The first batch has had its backward: only the second one is open, and counts for 2.
    assert ahead.has_equal_batches


def test_a_plain_backward_under_no_sync_trains_on_a_batch():
    """It is no reduction; the batches of a window would be taken for batches read ahead."""
    _, ahead = reading_ahead(ShardBatch(ROWS, 3, seed=1))
    for progress in (1, 2):
        ahead.note_read(ShardBatch(ROWS[:progress], progress, seed=2), progress=progress)
        assert ahead.has_equal_batches
    ahead.note_read(ShardBatch(ROWS, 3, seed=1), progress=2)
    assert not ahead.has_equal_batches


def test_a_batch_from_before_a_borrowed_one_is_refused():
    """Its copies as well: with this one and the borrowed one in hand, it may be from either."""
    context, _ = reading_ahead(ShardBatch(ROWS, 3, seed=1), ShardBatch(ROWS[:1], 0, seed=2))
    for batch in (ROWS, ROWS.clone()):
        with pytest.raises(WeightError, match="reads ahead") as caught:
            context.shards_in(batch)
        assert caught.value.details["where"] == "rank 1, step 3"


def test_a_borrowed_batch_itself_counts_nothing_after_one_that_was_left_out():
    borrowed = ShardBatch(ROWS[:1], 0, seed=2)
    context, _ = reading_ahead(ShardBatch(ROWS, 3, seed=1), borrowed)
    assert context.shards_in(borrowed.batch) == (borrowed,)


def test_a_loader_that_repeats_its_last_batch_as_a_borrowed_one_does_not_hide_which_it_is():
    context, _ = reading_ahead(ShardBatch(ROWS, 3, seed=1), ShardBatch(ROWS, 0, seed=2))
    with pytest.raises(WeightError, match="reads ahead"):
        context.shards_in(ROWS)


def test_batches_read_ahead_count_their_rows_where_rows_are_samples():
    short = ShardBatch(ROWS[:2], 2, seed=2)
    context, _ = reading_ahead(ShardBatch(ROWS, 3, seed=1), short)
    for batch in (ROWS, ROWS.clone(), short.batch, short.batch.clone(), ROWS[:1]):
        (shard,) = context.shards_in(batch)
        assert shard.num_samples == len(batch)
    (shard,) = context.shards_in((torch.ones(7, 3, 4), torch.ones(3)))  # time steps first
    assert shard.num_samples == 3
    for unknown in (torch.ones(7, 2), (torch.ones(3), torch.ones(2)), torch.ones(4, 2)):
        with pytest.raises(WeightError, match="reads ahead"):
            context.shards_in(unknown)


def test_batches_read_ahead_whose_rows_are_no_samples_are_exact_or_refused():
    """Three time steps of two samples, and of one."""
    alike, short = ShardBatch(ROWS * 2, 2, seed=2), ShardBatch(ROWS * 3, 1, seed=3)
    context, ahead = reading_ahead(ShardBatch(ROWS, 2, seed=1), alike)
    assert [each.num_samples for each in context.shards_in(ROWS)] == [2]
    ahead.note_read(short, progress=0)
    with pytest.raises(WeightError, match="reads ahead"):
        context.shards_in(ROWS)


def test_batches_read_ahead_of_as_many_samples_and_other_lengths_are_refused():
    """Two samples each, of three time steps and of one: `ROWS` may be cut from either."""
    context, _ = reading_ahead(ShardBatch(ROWS, 2, seed=1), ShardBatch(ROWS[:1], 2, seed=2))
    with pytest.raises(WeightError, match=r"\[2, 2\] samples and leading lengths \[3, 1\]"):
        context.shards_in(ROWS)


def test_a_loss_that_weighs_nothing_may_be_of_any_batch():
    """All were read before the first backward, and each holds rows of this worker's own."""
    _, ahead = reading_ahead(ShardBatch(ROWS, 3, seed=1), ShardBatch(ROWS[:1], 1, seed=2))
    ahead.note_end(progress=0)
    assert ahead.resolve_weight(0) == 0
    assert ahead.resolve_weight(1) == 1


@pytest.mark.parametrize("weights", [[], [3]])
def test_whether_the_batch_in_hand_counts_is_unknown_before_and_after_a_guess(weights):
    """Of two batches that were read, the second is borrowed."""
    _, ahead = reading_ahead(ShardBatch(ROWS, 3, seed=1), ShardBatch(ROWS[:1], 0, seed=2))
    ahead.note_end(progress=0)
    for weight in weights:
        assert ahead.resolve_weight(weight) == weight
    assert ahead.may_be_borrowed


def test_a_borrowed_batch_that_was_read_alone_is_known_to_be_one():
    _, ahead = reading_ahead(ShardBatch(ROWS[:1], 0, seed=2))
    assert ahead.are_borrowed
    assert not ahead.may_be_borrowed


def test_a_borrowed_batch_that_is_trained_on_after_the_end_counts_nothing():
    context, ahead = reading_ahead(ShardBatch(ROWS, 0, seed=1))
    ahead.note_end(progress=0)
    after = context.between_batches()
    assert after.is_borrowed
    assert [each.num_samples for each in after.shards_in(ROWS)] == [0]
    assert after.num_samples_of({NUM_SAMPLES: 3}) == 0
    assert after.weight_of_backward(5.0) == 0
    ahead.note_end(progress=1)
    assert not after.is_borrowed
    assert [each.num_samples for each in after.shards_in(ROWS)] == [3]
