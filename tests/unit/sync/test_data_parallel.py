# SPDX-License-Identifier: Apache-2.0
"""A model whose calls are shared out over devices: one model's outputs and gradients, or refused.

The devices are the CPU several times over; replicas are copies there as anywhere.
"""

import copy
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import assert_same, gradients, reset, rows
from kinds import KINDS, NESTED
from lockstep.errors import ConfigurationError, LostUpdateError, NotEnoughResourcesError
from lockstep.sync import DataParallelModel, replica_devices

# Torch says so once in a process, whoever makes such a tensor first.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]

X, Y = rows(11, 4, seed=1), rows(11, 3, seed=2)
CPU = torch.device("cpu")


def mlp():
    return reset(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), seed=7)


def replicated(model, count=3):
    return DataParallelModel(copy.deepcopy(model), [CPU] * count)


class Tied(nn.Module):
    """One weight twice, one layer that only some rows use, one that nobody uses, one frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.rare, self.never, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        rare = x[:, 0] > 1.0
        if rare.any():
            hidden = torch.where(rare[:, None], self.rare(hidden), hidden)
        return self.head(hidden)


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed():
    return reset(Checkpointed(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), seed=7)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 8, 11])
@pytest.mark.parametrize("make", [mlp, lambda: reset(Tied(), seed=3), checkpointed])
def test_outputs_and_gradients_are_the_one_models(make, size, count):
    true, x, y = make(), X[:size], Y[:size]
    model = replicated(true, count)
    for _ in range(2):  # the second is added to the first
        for each in (true, model):
            output = each(x)
            ((output - y) ** 2).sum(1).mean().backward()
        assert torch.allclose(output, true(x), rtol=1e-13, atol=1e-14)
        assert_same(gradients(model.module), gradients(true))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(2, 3, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.layer(x.unflatten(1, (2, 2)))[0][:, -1]


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_keep_their_own_weights(kind):
    true = reset(Recurrent(kind), seed=3)
    model = replicated(true)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (true, model)]
    for _ in range(3):
        for each, optimizer in zip((true, model), optimizers, strict=True):
            optimizer.zero_grad()
            ((each(X) - Y) ** 2).sum(1).mean().backward()
            optimizer.step()
        assert_same(gradients(model.module), gradients(true))
        # A list beside the parameters: a replica's copies in it would be what is saved.
        layer = model.module.layer
        own = {id(weight) for weight in layer.parameters()}
        assert {id(weight) for weight in layer._flat_weights} == own


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def forward(self, x):
        return self.table((x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def test_sparse_gradients_stay_sparse():
    true = reset(Table(), seed=3)
    model = replicated(true)
    optimizers = [torch.optim.SparseAdam(list(each.parameters())) for each in (true, model)]
    for _ in range(2):
        for each, optimizer in zip((true, model), optimizers, strict=True):
            optimizer.zero_grad()
            ((each(X) - Y) ** 2).sum(1).mean().backward()
            optimizer.step()
        assert model.table.weight.grad.is_sparse
        dense = [each.table.weight.grad.to_dense() for each in (model, true)]
        assert torch.allclose(*dense, rtol=1e-13, atol=1e-14)
        assert torch.allclose(model.table.weight, true.table.weight, rtol=1e-12)


class Holding(nn.Module):
    """Holds a buffer, and puts another one in its place if `put` says so."""

    def __init__(self, make):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("held", make(2.0))
        self.put = None

    def forward(self, x):
        if self.put is not None:
            self.held = self.put(x)
        return self.layer(x)


@pytest.mark.parametrize("make", [*KINDS.values(), *NESTED.values()], ids=[*KINDS, *NESTED])
def test_buffers_of_all_kinds(make):
    true = reset(Holding(make), seed=3)
    model = DataParallelModel(reset(Holding(make), seed=3), [CPU] * 3)
    for put in (None, lambda x: make(3.0)):  # every replica puts the same
        true.put = model.module.put = put
        for each in (true, model):
            each.zero_grad()
            ((each(X) - Y) ** 2).sum(1).mean().backward()
        assert_same(gradients(model.module), gradients(true))
    model.module.put = lambda x: make(float(len(x)))
    with pytest.raises(LostUpdateError, match="`held`"):
        model(X)


class Inside(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@pytest.mark.parametrize("kind", ["coo", "csr", "nested", "jagged"])
def test_what_cannot_be_cut_or_joined_is_refused_by_name(kind):
    makes = {
        "coo": torch.Tensor.to_sparse,
        "csr": torch.Tensor.to_sparse_csr,
        "nested": lambda x: torch.nested.nested_tensor(list(x)),
        "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    }
    make = makes[kind]
    with pytest.raises(ConfigurationError, match="input"):
        replicated(nn.Identity())(make(X))
    if kind == "coo":
        assert torch.equal(replicated(Inside(make))(X).to_dense(), X)
        return
    with pytest.raises(ConfigurationError, match="output"):
        replicated(Inside(make))(X)


# torch's compiler looks at the gradient of everything that goes into a graph, copies too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
# And of what it traces through makes an object, of which it warns itself.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["around the replicas", "inside"])
def test_a_compiled_model(whole):
    true, compiled = mlp(), mlp()
    if whole:
        model = torch.compile(DataParallelModel(compiled, [CPU] * 3), backend="aot_eager")
    else:
        model = DataParallelModel(torch.compile(compiled, backend="aot_eager"), [CPU] * 3)
    for each in (true, model):
        ((each(X) - Y) ** 2).sum(1).mean().backward()
    assert_same(gradients(compiled), gradients(true))


Pair = namedtuple("Pair", "left right")


@dataclass
class Named:
    features: torch.Tensor
    names: list


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen = []

    def forward(self, batch, scale, *, extra, size=(2, 3), flag=None):
        self.seen.append((len(batch["x"]), batch["named"].names, size))
        assert flag is None
        out = self.layer(batch["x"] + batch["named"].features) * scale * extra.left
        return {"out": out, "pair": Pair(out * 2, [extra.right, "same"]), "nothing": None}


def test_nested_inputs_and_outputs():
    true = reset(Nested(), seed=5)
    model = replicated(true)
    batch = {"x": X, "named": Named(X * 2, [f"row {n}" for n in range(11)])}
    extra = Pair(torch.tensor(2.0, dtype=torch.float64), Y)
    expected, got = (each(batch, 3, extra=extra) for each in (true, model))
    assert torch.allclose(got["out"], expected["out"], rtol=1e-13)
    assert type(got["pair"]) is Pair
    assert torch.equal(got["pair"].right[0], Y)
    assert got["pair"].right[1] == "same"
    assert got["nothing"] is None
    assert [(count, size) for count, _, size in model.module.seen] == [
        (3, (2, 3)),
        (4, (2, 3)),
        (4, (2, 3)),
    ]
    assert [name for _, names, _ in model.module.seen for name in names] == batch["named"].names


def test_other_ways_into_the_model_are_the_one_models():
    model = DataParallelModel(reset(Tied(), seed=3), [CPU] * 3)
    assert model.first is model.module.first
    assert model.module.first.weight is next(model.parameters())
    assert not hasattr(model, "no_such")


def test_what_has_no_rows_is_refused():
    model = replicated(mlp())
    wrapped = DataParallelModel(MeanOutput(), [CPU] * 2)
    transposed = DataParallelModel(Transposed(), [CPU] * 2)
    with pytest.raises(ConfigurationError, match="LS001") as caught:
        replicated(reset(Nested(), seed=5))({"x": X, "named": Named(X[:5], [])}, 1, extra=X)
    assert "['named'].features" in str(caught.value)
    with pytest.raises(ConfigurationError, match="shape \\(\\)"):
        wrapped(X)
    with pytest.raises(ConfigurationError, match="shape \\(4, 5\\)"):
        transposed(X)
    assert model(X).shape == (11, 3)


class MeanOutput(nn.Module):
    def forward(self, x):
        return x.mean()


class Transposed(nn.Module):
    def forward(self, x):
        return x.t()


class Writes(nn.Module):
    """Writes in forward what `how` says."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.full((4,), torch.nan, dtype=torch.float64))

    def forward(self, x):
        out = x * self.weight
        if self.how == "clamp":
            self.weight.data.clamp_(max=0.5)
        elif self.how == "data":
            self.weight.data.sub_(x.mean(0))
        elif self.how == "no_grad":
            with torch.no_grad():
                self.weight.mul_(x.mean())
        elif self.how == "counter":
            self.calls += 1
        elif self.how == "replaced counter":
            self.calls = self.calls + 1
        elif self.how == "buffer":
            self.mean.copy_(x.mean(0))
        elif self.how == "replaced buffer":
            self.mean = x.mean(0)
        elif self.how == "attribute":
            self.penalty = out.square().mean()
        elif self.how == "list":
            self.__dict__.setdefault("penalties", []).append(out.square().mean())
        return out


@pytest.mark.parametrize(
    "how", ["data", "no_grad", "buffer", "replaced buffer", "attribute", "list"]
)
def test_a_write_that_would_be_lost_is_refused(how):
    model = DataParallelModel(Writes(how), [CPU] * 2)
    with pytest.raises(LostUpdateError, match="LS310"):
        model(X)


@pytest.mark.parametrize("how", ["nothing", "clamp", "counter", "replaced counter"])
def test_a_write_that_every_replica_makes_alike_stays(how):
    model, true = DataParallelModel(Writes(how), [CPU] * 2), Writes(how)
    for _ in range(2):
        assert torch.equal(model(X), true(X))
        for name, value in true.state_dict().items():
            assert torch.equal(model.module.state_dict()[name].nan_to_num(), value.nan_to_num())


def test_running_statistics_are_replica_zeros():
    model, first = DataParallelModel(nn.BatchNorm1d(4).double(), [CPU] * 2), nn.BatchNorm1d(4)
    first.double()(X[:5])
    model(X)
    for name, value in first.state_dict().items():
        assert torch.equal(model.module.state_dict()[name], value)


def test_statistics_over_all_replicas_are_refused():
    layer = nn.Sequential(nn.SyncBatchNorm(4))
    DataParallelModel(layer, [CPU])
    with pytest.raises(ConfigurationError, match="`0`"):
        DataParallelModel(layer, [CPU] * 2)


def test_dropout_is_drawn_anew_for_every_replica():
    model = DataParallelModel(nn.Dropout(0.5), [CPU] * 2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out = model(torch.ones(128, 8))
    assert not torch.equal(out[:64], out[64:])


def test_without_gradients_and_without_rows():
    model = replicated(mlp())
    with torch.no_grad():
        assert not model(X).requires_grad
    assert model(X[:0]).shape == (0, 3)


def test_more_replicas_than_devices_are_refused():
    assert replica_devices(CPU, 3) == [CPU] * 3
    with pytest.raises(NotEnoughResourcesError, match="LS005"):
        replica_devices(torch.device("cuda"), 1 + torch.cuda.device_count())
