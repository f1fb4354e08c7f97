# SPDX-License-Identifier: Apache-2.0
"""A run whose model holds a buffer that is sparse, quantized, nested, expanded or conjugate."""

import pytest
import torch
from tests.unit.trainer.programs import Regression, by_hand, linear, loader, same, sgd, trainer
from torch import nn

from kinds import KINDS, NESTED
from lockstep.errors import ConfigurationError
from lockstep.sync.tensor_bits import same_bits

# Torch says so once in a process, whoever makes such a tensor first.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

EVERY = [(name, True) for name in KINDS] + [(name, False) for name in [*KINDS, *NESTED]]


class Net(nn.Module):
    def __init__(self, tensor, persistent=True):
        super().__init__()
        self.layer = linear()
        self.register_buffer("held", tensor, persistent=persistent)

    def forward(self, x):
        return self.layer(x)


def holding(make, *, persistent=True, own_loop=False):
    class Operator(Regression):
        def setup(self, config):
            model = Net(make(2.0), persistent)
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=sgd(model), criterion=nn.MSELoss()
            )
            self.register_data(train_loader=loader(), validation_loader=loader())

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}

    if own_loop:
        Operator.train_batch = train_batch
    return Operator


WAYS = {
    "one": {},
    "own loop": {},
    "shards": {"num_shards": 3},
    "window": {"accumulate": 2},
    "replicas": {"sync": "data_parallel", "num_workers": 2},
    "owner": {"sync": "parameter_server"},
}


@pytest.mark.sampled
@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize(("kind", "persistent"), EVERY)
def test_a_run_from_its_beginning_to_its_end(tmp_path, kind, persistent, way):
    make = {**KINDS, **NESTED}[kind]
    operator = holding(make, persistent=persistent, own_loop=way == "own loop")
    with trainer(operator, **WAYS[way]) as run:
        run.train(num_steps=2)
        path = run.save(tmp_path / "state")
        run.train(num_steps=1)
        assert run.verify(num_steps=1).ok
        run.load(path)
        run.load_state_dict(run.state_dict())
        run.validate()
        run.train(num_steps=2)
        model = run.get_model()
    assert same_bits(model.held, make(2.0))
    if way in ("one", "own loop", "owner"):
        expected = by_hand(4)
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert same(found, expected)


@pytest.mark.parametrize("kind", [*KINDS])
def test_what_was_saved_is_what_is_loaded(kind):
    make, operator = KINDS[kind], holding(KINDS[kind])
    with trainer(operator) as run:
        run.get_local_operator().model.held = make(3.0)
        state = run.state_dict()
    with trainer(operator) as run:
        run.load_state_dict(state)
        assert same_bits(run.get_model().held, make(3.0))


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_buffer_that_has_come_to_hold_more_numbers(layout):
    few, many = (getattr(dense, layout)() for dense in (torch.eye(3), torch.ones(3, 3)))
    operator = holding(lambda _: few)
    with trainer(operator) as run:
        run.get_local_operator().model.held = many
        state = run.state_dict()
    with trainer(operator) as run:
        run.load_state_dict(state)
        assert same_bits(run.get_model().held, many)
        run.train(num_steps=1)


def test_a_buffer_that_two_modules_share_stays_shared_when_it_is_loaded():
    class Sharing(Net):
        def __init__(self):
            super().__init__(KINDS["expanded"](2.0))
            self.other = nn.Module()
            self.other.register_buffer("held", self.held)

    class Operator(Regression):
        def setup(self, config):
            model = Sharing()
            self.model, self.optimizer, self.criterion = self.register(
                models=model, optimizers=sgd(model), criterion=nn.MSELoss()
            )
            self.register_data(train_loader=loader())

    with trainer(Operator) as run:
        run.load_state_dict(run.state_dict())
        model = run.get_local_operator().model
        assert model.held is model.other.held


@pytest.mark.parametrize("kind", [*NESTED])
def test_a_nested_buffer_that_a_state_would_hold_is_refused_by_name(kind):
    with pytest.raises(ConfigurationError, match="LS001") as caught:
        trainer(holding(NESTED[kind]))
    assert "`held`" in str(caught.value)
    assert "persistent=False" in str(caught.value)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without MKL-DNN")
@pytest.mark.parametrize("persistent", [True, False])
def test_an_opaque_buffer_is_refused_by_name(persistent):
    with pytest.raises(ConfigurationError, match="LS001") as caught:
        trainer(holding(lambda value: torch.full((3,), value).to_mkldnn(), persistent=persistent))
    assert "`held`" in str(caught.value)
