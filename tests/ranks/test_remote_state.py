# SPDX-License-Identifier: Apache-2.0
"""A state that is loaded into an optimizer at a parameter server is there bit by bit."""

import copy

import pytest
import torch
from tests.procs.odd_optimizers import Lookahead

from harness import reset, rows
from lockstep.sync import ParameterServerSync
from lockstep.sync.optimizer_inspection import load_state, optimizers_with_state
from ranks.served import serve_ranks

X = rows(12, 4, seed=1).to(torch.bfloat16)


class Masters(torch.optim.SGD):
    """Steps float32 copies of bfloat16 weights, which keep what bfloat16 would round away."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                master = state.setdefault("master", param.detach().float())
                master.sub_(param.grad.float(), alpha=group["lr"])
                state["mask"] = master > 0
                param.copy_(master)


def masters(params):
    return Masters(params, lr=1e-3)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "make", [masters, lambda params: Lookahead(masters(params))], ids=["alone", "within"]
)
def test_dtypes_and_bits_of_a_loaded_state_stay(make, size):
    models = [reset(torch.nn.Linear(4, 2), 7).to(torch.bfloat16) for _ in range(size)]

    def one_rank(group, address):
        model = models[group.rank]
        optimizer = make(model.parameters())
        sync = ParameterServerSync([model], [optimizer], group, address)
        try:
            for _ in range(3):
                optimizer.zero_grad()
                sync.backward(model(X).square().mean(), weight=1)
                optimizer.step()
            members = optimizers_with_state([optimizer])
            kept = [copy.deepcopy(each.state_dict()) for each in members]
            for each, state in zip(members, kept, strict=True):
                load_state(each, copy.deepcopy(state))
            # A step that changes no master: what an optimizer within had loaded here is gone.
            optimizer.zero_grad()
            sync.backward((model(X) * 0).sum(), weight=1)
            optimizer.step()
            return kept, [each.state_dict() for each in members]
        finally:
            sync.detach()

    for kept, now in serve_ranks(size, one_rank):
        *_, before = kept
        *_, after = now
        assert len(before["state"]) == 2
        for number, state in before["state"].items():
            assert state["master"].dtype is torch.float32
            assert not torch.equal(state["master"], state["master"].bfloat16().float())
            for name, value in state.items():
                assert after["state"][number][name].dtype is value.dtype
                assert torch.equal(after["state"][number][name], value)
