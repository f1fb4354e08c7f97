# SPDX-License-Identifier: Apache-2.0
"""`lockstep.worker.settings_copy`, and the copies of GradScalers (`_torch_compat.scaler_copy`)."""

import pytest
import torch

from lockstep._torch_compat.scaler_copy import ScalerCopy


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
