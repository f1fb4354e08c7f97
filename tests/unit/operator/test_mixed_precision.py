# SPDX-License-Identifier: Apache-2.0
"""Loss scaling on a rank that has no loss, and after a step that was interrupted."""

from types import SimpleNamespace

import torch
from torch import nn

from lockstep.operator.mixed_precision import Precision

CPU = torch.device("cpu")


def a_weight(gradient):
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    weight.grad = torch.full_like(weight, gradient)
    return weight, torch.optim.SGD([weight], lr=1.0)


def test_a_rank_without_a_loss_in_its_first_step_unscales_what_its_peers_have_scaled():
    weight, optimizer = a_weight(2.0**16)
    Precision("fp16", CPU).step(optimizer, [weight], None)
    assert weight.tolist() == [0.0, 0.0]


def test_a_norm_with_an_overflow_of_another_weight_skips_the_step():
    precision = Precision("fp16", CPU)
    weight, optimizer = a_weight(2.0**16)
    other, _ = a_weight(float("inf"))
    precision.step(optimizer, [weight, other], 1.0)
    assert weight.tolist() == [1.0, 1.0]
    assert precision.state_dict()["scale"] == 2.0**15
    weight.grad, other.grad = torch.full_like(weight, 2.0**15), torch.zeros_like(other)
    precision.step(optimizer, [weight, other], 10.0)
    assert weight.tolist() == [0.0, 0.0]


def test_the_scale_of_a_state_is_that_of_a_rank_that_has_scaled_nothing():
    state = Precision("fp16", CPU).state_dict()
    other = Precision("fp16", CPU)
    other.load_state_dict({**state, "scale": 8.0})
    weight, optimizer = a_weight(8.0)
    other.step(optimizer, [weight], None)
    assert weight.tolist() == [0.0, 0.0]


def test_every_scaler_forgets_that_it_has_unscaled():
    precision, own = Precision("fp16", CPU), torch.amp.GradScaler("cpu")
    own.scale(torch.ones(()))
    _, optimizer = a_weight(1.0)
    operator = SimpleNamespace(own=own, never_used=torch.amp.GradScaler("cpu"), other=3)
    for _ in range(2):
        precision.unscale(optimizer)
        own.unscale_(optimizer)
        precision.forget_unscaled(operator)


def test_scalers_in_containers_and_in_modules_forget_as_well():
    scalers = [torch.amp.GradScaler("cpu") for _ in range(3)]
    module = torch.nn.Linear(1, 1)
    module.scaler = scalers[0]
    operator = SimpleNamespace(by_name={"d": scalers[1]}, listed=[scalers[2], None])
    _, optimizer = a_weight(1.0)
    for scaler in scalers:
        scaler.scale(torch.ones(()))
        for _ in range(2):
            scaler.unscale_(optimizer)
            Precision("fp32", CPU).forget_unscaled(operator, module)
