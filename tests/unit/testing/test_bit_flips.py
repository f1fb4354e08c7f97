# SPDX-License-Identifier: Apache-2.0
"""A flip changes one bit of one number, and autograd does not notice."""

import pytest
import torch

from lockstep.errors import ConfigurationError
from lockstep.testing import Flip
from lockstep.testing.bit_flips import flip_bit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("position", [0.0, 0.5, 0.99])
def test_one_bit_of_one_number(dtype, position):
    for bit in (0, 7, 8 * torch.finfo(dtype).bits // 8 - 1):
        tensor = torch.ones(3, 4, dtype=dtype).t()
        flip_bit(tensor, position, bit)
        changed = tensor != 1
        assert int(changed.sum()) == 1
        flip_bit(tensor, position, bit)
        assert bool((tensor == 1).all())


def test_the_sign():
    tensor = torch.ones(2)
    flip_bit(tensor, 0.5, 31)
    assert tensor.tolist() == [1.0, -1.0]


def test_a_lone_number():
    tensor = torch.tensor(1.0)
    flip_bit(tensor, 0.9, 0)
    assert tensor.item() == 1.0 + 2.0**-23


def test_autograd_goes_on_with_the_wrong_number():
    """As with a processor's fault, nothing raises."""
    x = torch.ones(2, requires_grad=True)
    output = torch.relu(x)
    flip_bit(output, 0.0, 23)
    (output * output).sum().backward()
    assert x.grad.tolist() == [2 * output[0].item(), 2.0]


@pytest.mark.parametrize("arguments", [{"place": "disk"}, {"position": 1.0}, {"position": -0.1}])
def test_what_cannot_flip_is_refused(arguments):
    with pytest.raises(ConfigurationError):
        Flip(**({"place": "weight", "rank": 0, "step": 0} | arguments))
