# SPDX-License-Identifier: Apache-2.0
"""Workers that compile nothing do without torch's compiler, and get the same numbers."""

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from lockstep import TorchTrainer, TrainingOperator
from lockstep.compiler_disable import disable_dynamo
from lockstep.lazy_dynamo_import import import_compiler_lazily
from lockstep.sync.weighted_loss_scale import scale_loss

OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.RMSprop(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
]

class Mine(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        self.register(
            models=model,
            optimizers=config["make"](model.parameters()),
            criterion=nn.MSELoss(),
            schedulers=None,
        )
        data = torch.utils.data.TensorDataset(
            torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
        )
        self.register_data(train_loader=torch.utils.data.DataLoader(data, 4))

def trained():
    weights = []
    for make in OPTIMIZERS:
        with TorchTrainer(training_operator_cls=Mine, config={"make": make}) as trainer:
            trainer.train(num_steps=2)
            trainer.load_state_dict(trainer.state_dict())
            trainer.train(num_steps=4)
            weights += [value.clone() for value in trainer.get_model().state_dict().values()]
    return weights

import_compiler_lazily()
told = []

@disable_dynamo
def report(value):
    told.append(torch.compiler.is_compiling())
    return value + float(value.detach().sum())

class Listener:
    def hear(self, module, *_):
        heard.append(module)

heard = []
handle = register_module_parameter_registration_hook(disable_dynamo(Listener().hear))
nn.Linear(1, 1)
assert report(torch.ones(2)).tolist() == [3.0, 3.0]
without = trained()

leaf = torch.ones(2, dtype=torch.float16, requires_grad=True)
seen = []
loss = (leaf * 2).mean()
loss.register_hook(seen.append)
carried, root, given = scale_loss(loss, None, 0.7, "here")
assert (root.item(), given) == (loss.item(), None)
root.backward()
assert leaf.grad.tolist() == [carried] * 2 and seen == [carried]
assert carried == torch.tensor(0.7, dtype=torch.float16).item()
assert "torch._dynamo" not in sys.modules
assert "sympy" not in sys.modules

reporting = torch.compile(lambda value: report(value * 2) * 2, backend="eager")
assert [reporting(torch.full((2,), n)).tolist() for n in (1.0, 2.0)] == [[12.0] * 2, [24.0] * 2]
assert told == [False] * 3
assert "torch._dynamo" in sys.modules

# A bound method goes on being called: torch finds a place for its note on it.
before = len(heard)
nn.Linear(1, 1)
assert len(heard) == before + 2
handle.remove()

def stepped(compile):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    @compile
    def step(value):
        optimizer.zero_grad()
        report(model(value).square().mean()).backward()
        optimizer.step()

    @compile
    def renewed():
        fresh = torch.optim.Adam(model.parameters(), lr=0.3)
        fresh.load_state_dict(optimizer.state_dict())
        return fresh

    for n in range(4):
        step(torch.full((4, 3), float(n)))
    optimizer = renewed()
    assert optimizer.param_groups[0]["lr"] == 0.1
    step(torch.ones(4, 3))
    return model.weight.detach().clone()

def whole(function):
    return torch.compile(function, backend="eager")

told.clear()
torch.testing.assert_close(stepped(whole), stepped(lambda function: function))
assert told == [False] * 10

with_it = trained()
assert all(map(torch.equal, without, with_it))
print("all of it")
"""


_DETERMINISTIC = """
import os
import sys
import torch
from lockstep.worker.determinism import deterministic_mode

def modes():
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns, dict(os.environ)

torch.set_deterministic_debug_mode("warn")
before = modes()
with deterministic_mode(None):
    assert modes()[:2] == (True, False)
assert modes() == before
assert "torch._dynamo" not in sys.modules

with deterministic_mode(None):
    import torch._inductor.config as compiler
    assert compiler.deterministic
with deterministic_mode(None):
    assert compiler.deterministic
torch.use_deterministic_algorithms(False)
before = modes()
with deterministic_mode(None):
    assert compiler.deterministic and modes()[:2] == (True, False)
assert modes() == before and not compiler.deterministic
print("all of it")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(_PROGRAM, id="optimizers"),
        pytest.param(_DETERMINISTIC, id="determinism"),
    ],
)
def test_the_same_before_and_after_somebody_compiles(program):
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert told.stdout.split("\n")[-2:] == ["all of it", ""], told.stderr[-3000:]
