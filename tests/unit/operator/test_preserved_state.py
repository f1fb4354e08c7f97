# SPDX-License-Identifier: Apache-2.0
"""A forward may change what it likes, and leaves nothing behind."""

from collections import deque

import torch
from torch import nn

from lockstep import TorchTrainer, TrainingOperator
from lockstep.operator.preserved_state import preserve_state


class Stateful(TrainingOperator):
    def setup(self, config):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.model, _ = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        self.count, self.items, self.recent = 0, [1], deque([1], maxlen=4)
        self.by_name, self.total = {"a": 1}, torch.zeros(2)
        self.generator = torch.Generator().manual_seed(3)


def changed(operator):
    """Change all of it; what a forward has drawn."""
    operator.count += 1
    operator.items.append(2)
    operator.recent.append(2)
    operator.by_name["b"] = 2
    operator.total += 1
    operator.fresh = True
    operator.model[0].seen = True
    operator.model.train()(torch.randn(8, 2))
    return torch.rand(()).item(), torch.rand((), generator=operator.generator).item()


def state_of(operator):
    return (
        operator.count,
        list(operator.items),
        list(operator.recent),
        dict(operator.by_name),
        operator.total.tolist(),
        hasattr(operator, "fresh"),
        hasattr(operator.model[0], "seen"),
        {name: value.tolist() for name, value in operator.model.state_dict().items()},
        torch.get_rng_state().tolist(),
        operator.generator.get_state().tolist(),
    )


def test_all_is_put_back():
    with TorchTrainer(training_operator_cls=Stateful) as trainer:
        operator = trainer.get_local_operator()
        before, items = state_of(operator), operator.items
        with preserve_state(operator):
            drawn = changed(operator)
            assert state_of(operator) != before
        assert state_of(operator) == before
        assert operator.items is items
        with preserve_state(operator):
            assert changed(operator) == drawn
