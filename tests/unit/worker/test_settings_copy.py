# SPDX-License-Identifier: Apache-2.0
"""`lockstep.worker.settings_copy`, and the copies of GradScalers (`_torch_compat.scaler_copy`)."""

import pytest
import torch

from lockstep._torch_compat.scaler_copy import ScalerCopy
from lockstep.worker.settings_copy import StepSettings


@pytest.mark.parametrize("is_used", [False, True])
def test_a_scaler_goes_back_to_its_scale_and_keeps_its_tensors(is_used):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if is_used:
        scaler.scale(torch.ones(()))
    before, kept = scaler.state_dict(), ScalerCopy(scaler)
    scaler.scale(torch.ones(()))
    scaler.update(2.0)
    scaler.set_growth_factor(3.0)
    tensor = scaler._scale
    kept.restore()
    assert scaler.state_dict() == before
    assert scaler._scale is tensor


def test_a_scaler_that_is_not_enabled_has_nothing_to_go_back_to():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ScalerCopy(scaler).restore()
    assert scaler.state_dict() == {}


def test_no_number_is_read_from_a_device(monkeypatch):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "item", lambda _: pytest.fail("waits for the device"))
        kept = ScalerCopy(scaler)
        scaler.update(2.0)
        kept.restore()
    assert scaler.get_scale() == 8.0


def optimizer_with(**settings):
    made = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.5)
    made.param_groups[0].update(settings)
    return made, made.param_groups[0]


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)])
def test_what_a_loss_has_changed_is_undone_although_something_else_was_set_after_it(rate):
    optimizer, group = optimizer_with(lr=rate, of_before=1)
    step = StepSettings([optimizer])
    group["lr"] *= 0.5  # by the first loss, as what follows
    group["of_loss"] = 1
    step.end_batch()
    group["momentum"] = 0.25  # by the program, as what follows
    group["bound"] = torch.tensor(2.0)
    del group["of_before"]
    step.begin_batch()
    group["lr"] *= 0.5  # by the second loss, as what follows
    group["bound"] *= 3
    step.restore()
    assert float(group["lr"]) == 1.0
    assert group["lr"] is rate
    assert (group["momentum"], float(group["bound"])) == (0.25, 2.0)
    assert not group.keys() & {"of_loss", "of_before"}


def test_a_tensor_that_was_written_to_between_two_batches_keeps_what_was_written():
    rate = torch.tensor(1.0)
    optimizer, group = optimizer_with(lr=rate)
    step = StepSettings([optimizer])
    step.end_batch()
    rate.fill_(4.0)
    step.begin_batch()
    rate.fill_(5.0)
    step.restore()
    assert group["lr"] is rate
    assert float(rate) == 4.0


def test_a_group_that_was_added_between_two_batches_stays():
    optimizer, _ = optimizer_with()
    step = StepSettings([optimizer])
    step.end_batch()
    optimizer.add_param_group({"params": [torch.zeros(2)], "lr": torch.tensor(2.0)})
    step.begin_batch()
    optimizer.param_groups[1]["lr"].fill_(3.0)
    step.restore()
    assert float(optimizer.param_groups[1]["lr"]) == 2.0
