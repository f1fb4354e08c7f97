# SPDX-License-Identifier: Apache-2.0
"""The parity check that users run in their own suites: right is right, and wrong is explained."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import LockstepError
from lockstep.parity import compare
from lockstep.testing import assert_parity

FEATURES = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.randn(7, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make_model():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)).double()


def step(model, batch):
    features, targets = batch
    return nn.functional.mse_loss(model(features), targets)


def own_backward(model, batch):
    step(model, batch).backward()


# 7 rows over 4 ranks are 2, 2, 2, 1; the second batch leaves two ranks without any.
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("step_fn", [step, own_backward])
def test_a_right_step_is_equal_on_uneven_and_empty_ranks(step_fn, world_size):
    batches = [(FEATURES, TARGETS), (FEATURES[:2], TARGETS[:2])]
    report = assert_parity(step_fn, make_model, batches, world_size=world_size)
    assert report.ok
    assert len(report.rows) == 4
    assert report.notes == ["dropout is off in layer `2`"]


def contrastive(model, batch):
    features, targets = batch
    return lockstep.info_nce(model(features), targets, torch.tensor(2.0, dtype=torch.float64))


def over_all_rows(model, batch):
    """A variance, which is no mean of the ranks' own."""
    features, _ = batch
    return lockstep.gather(model(features)).var()


def norm(model, batch):
    """The root of a mean over all rows."""
    return lockstep.global_mean(model(batch[0]).square().sum(1)).sqrt()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("step_fn", [contrastive, over_all_rows, norm])
def test_a_loss_that_communicates_is_compared_too(step_fn, world_size):
    batches = [(FEATURES, TARGETS), (FEATURES[:2], TARGETS[:2])]
    assert assert_parity(step_fn, make_model, batches, world_size=world_size).ok


def test_a_loss_that_is_no_mean_is_found_and_shown():
    def summed(model, batch):
        return step(model, batch) * len(batch[0])

    with pytest.raises(AssertionError, match=r"0\.weight") as caught:
        assert_parity(summed, make_model, [(FEATURES, TARGETS)])
    assert "2 workers against one process: 4 of 4 parameters differ" in str(caught.value)
    assert isinstance(caught.value, LockstepError)


def test_the_error_of_a_step_is_told_and_not_that_its_peers_lost_the_rank():
    def needs_pairs(model, batch):
        if len(batch[0]) % 2:
            raise ValueError("rows come in pairs")
        return step(model, batch)

    rows = FEATURES.repeat(2, 1)[:10]  # over 3 ranks 4, 3, 3
    with pytest.raises(ValueError, match="rows come in pairs"):
        assert_parity(needs_pairs, make_model, [(rows, rows[:, :2])], world_size=3)


TRUE = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}


@pytest.mark.parametrize(
    ("by_rank", "explanation"),
    [
        ([TRUE["w"] * 2, TRUE["w"] * 2], "2 times too large"),
        ([TRUE["w"] / 2, TRUE["w"] / 2], "divided twice"),
        ([TRUE["w"] * 1.3, TRUE["w"] * 1.3], "1.300 times the true gradient"),
        ([TRUE["w"].flip(0), TRUE["w"].flip(0)], "a gradient path is missing"),
        ([TRUE["w"], TRUE["w"] * 1.5], "not synchronised"),
        ([TRUE["w"], None], "no gradient here"),
    ],
)
def test_what_is_wrong_is_said_in_words(by_rank, explanation):
    report = compare(TRUE, [{"w": grad} for grad in by_rank])
    assert not report.ok
    assert explanation in report.rows[0].explanation
    assert explanation in str(report)
    assert explanation in report._repr_html_()


def test_rounding_and_parameters_without_gradients_are_equal():
    truth = {**TRUE, "unused": None, "zero": torch.zeros(2, dtype=torch.float64)}
    noisy = {"w": TRUE["w"] * (1 + 1e-15), "unused": None, "zero": torch.full((2,), 1e-17)}
    report = compare(truth, [noisy, noisy])
    assert report.ok, str(report)
    assert not compare({"w": None}, [TRUE]).ok


def test_a_wrong_imaginary_part_is_no_rounding():
    true = {"w": torch.tensor([3.0 + 4.0j, 1.0 + 0.0j], dtype=torch.complex128)}
    wrong = {"w": true["w"].real + 0.0j}
    assert compare(true, [true, true]).ok
    assert not compare(true, [wrong, wrong]).ok
    slightly = {"w": true["w"] * (1 + 1e-9j)}
    assert not compare(true, [slightly, slightly]).ok


def test_where_one_process_has_nothing_but_zeros_other_numbers_are_wrong():
    zeros, ones = ({"w": torch.full((2,), value)} for value in (0.0, 1.0))
    assert compare(zeros, [zeros, zeros]).ok
    report = compare(zeros, [zeros, ones])
    assert not report.ok
    assert "zero in one process, and not here" in str(report)


def test_what_is_not_finite_is_said_to_be_so():
    bad = torch.tensor([3.0, float("nan")], dtype=torch.float64)
    both = compare({"w": bad}, [{"w": bad.clone()}, {"w": bad.clone()}])
    assert both.ok
    assert "in one process as well" in str(both)
    one_side = compare(TRUE, [TRUE, {"w": bad}])
    assert not one_side.ok
    assert "rank 1: NaN or infinite on one side only" in str(one_side)
