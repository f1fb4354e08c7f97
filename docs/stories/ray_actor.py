# SPDX-License-Identifier: Apache-2.0
"""Train in Ray tasks and actors: which weights change?

python docs/stories/ray_actor.py
"""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ray
from lockstep import TorchTrainer, TrainingOperator

STEPS = 10


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(10, 1, dtype=torch.float64)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(7, 10, generator=generator, dtype=torch.float64)
    return features, torch.randn(7, 1, generator=generator, dtype=torch.float64)


def moved(model: nn.Linear) -> str:
    """How far the weights are from where they began."""
    distance = (model.weight - make_model().weight).abs().max().item()
    return f"moved by {distance:.4f}" if distance else "not one bit moved"


def one_process() -> nn.Linear:
    """What all of them should end with."""
    features, labels = make_data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), labels).backward()
        optimizer.step()
    return model


# ------------------------------------------------------------------------------ a task


@ray.remote
def train_step(model, optimizer, features, labels):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(features), labels).backward()
    optimizer.step()
    return model


@ray.remote
def train_both(both, features, labels):
    model, optimizer = both
    nn.functional.mse_loss(model(features), labels).backward()
    optimizer.step()
    return model


def in_a_task() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        returned = ray.get(train_step.remote(model, optimizer, *make_data()))
    print(f"  the model in this program:   {moved(model)}")
    print(f"  the model that came back:    {moved(returned)}")
    returned = ray.get(train_both.remote((model, optimizer), *make_data()))
    print(f"  both handed over in a tuple: {moved(returned)}, in the copy, in one step")


# ----------------------------------------------------------------------------- an actor


@ray.remote
class Trainer:
    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)

    def train_step(self, features, labels):
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(features), labels).backward()
        self.optimizer.step()

    def state_dict(self):
        return self.model.state_dict()


def in_an_actor(with_optimizer: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if with_optimizer else None
    trainer = Trainer.remote(model, optimizer)
    for _ in range(STEPS):
        ray.get(trainer.train_step.remote(*make_data()))
    print(f"  the model in this program:   {moved(model)}")
    try:
        trainer.model.remote()
    except AttributeError as error:
        print(f"  trainer.model.remote():      {type(error).__name__}")
    model.load_state_dict(ray.get(trainer.state_dict.remote()))
    print(f"  the state_dict of the actor: {moved(model)}")


# ------------------------------------------------------------- the remedy that is handed around


@ray.remote
def compute_gradients(state, features, labels):
    model = make_model()
    model.load_state_dict(state)
    nn.functional.mse_loss(model(features), labels).backward()
    return [parameter.grad for parameter in model.parameters()]


def gradients_by_hand(guarded: bool) -> nn.Linear:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    features, labels = make_data()
    shares = [slice(0, 5), slice(5, 7)]  # seven rows on two workers
    for _ in range(STEPS):
        state = copy.deepcopy(model.state_dict())
        by_worker = ray.get(
            [compute_gradients.remote(state, features[rows], labels[rows]) for rows in shares]
        )
        optimizer.zero_grad()
        for number, parameter in enumerate(model.parameters()):
            if parameter.grad is not None or not guarded:
                parameter.grad = sum(gradients[number] for gradients in by_worker) / len(shares)
        optimizer.step()
    return model


# ------------------------------------------------------------------------------- lockstep


def with_lockstep() -> nn.Linear:
    model = make_model()
    operator = TrainingOperator.from_model(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        criterion=nn.MSELoss(),
        # Four rows for each worker: one gets four, the other three.
        train_loader=DataLoader(TensorDataset(*make_data()), batch_size=4),
    )
    with TorchTrainer(training_operator_cls=operator, num_workers=2) as trainer:
        for _ in range(STEPS):
            trainer.train()
    return model


def compared(model: nn.Linear) -> str:
    away = (model.weight - one_process().weight).abs().max().item()
    end = "where one process ends" if away < 1e-12 else f"{away:.4f} away from one process"
    return f"{moved(model)}, {end}"


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    print(f"{STEPS} steps in one process: {compared(one_process())}")
    print("the step in a task")
    in_a_task()
    print("the step in an actor that was given the model and its optimizer")
    in_an_actor(with_optimizer=True)
    print("the step in an actor that makes its own optimizer")
    in_an_actor(with_optimizer=False)
    print("gradients fetched and averaged by hand")
    print(f"  with the guard `if p.grad is not None`: {compared(gradients_by_hand(True))}")
    print(f"  without it: {compared(gradients_by_hand(False))}")
    print("lockstep, two workers")
    print(f"  the model in this program: {compared(with_lockstep())}")


if __name__ == "__main__":
    main()
