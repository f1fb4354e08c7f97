# SPDX-License-Identifier: Apache-2.0
"""`lockstep._torch_compat.backward_inputs`: who is asked for the inputs of a backward, and when."""

import torch

from lockstep._torch_compat.backward_inputs import choose_inputs


def test_inputs_are_chosen_for_backward_and_grad_and_for_nothing_else():
    theirs = torch.autograd._engine_run_backward
    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    asked = []

    def choose(outputs, inputs, *, accumulates):
        asked.append((list(map(id, outputs)), list(map(id, inputs)), accumulates))
        return [*inputs, other] if accumulates else inputs

    with choose_inputs(choose), choose_inputs(lambda _, inputs, *, accumulates: inputs):
        loss = (one * other).sum()
        loss.backward(retain_graph=True)
        assert asked == []
        one.grad = other.grad = None
        loss.backward(inputs=[one], retain_graph=True)
        assert torch.equal(other.grad, torch.ones(2))
        (grad,) = torch.autograd.grad(loss, [one])
        assert torch.equal(grad, torch.ones(2))
        assert asked == [([id(loss)], [id(one)], True), ([id(loss)], [id(one)], False)]
    assert torch.autograd._engine_run_backward is theirs
