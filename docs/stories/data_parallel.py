# SPDX-License-Identifier: Apache-2.0
"""What `nn.DataParallel` loses and what it does not, as far as a CPU can show it.

python docs/stories/data_parallel.py
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import ray
from lockstep import TorchTrainer, TrainingOperator

ROWS = 7
SHARES = [slice(0, 4), slice(4, 7)]
"""Seven rows on two devices."""


class Model(nn.Module):
    """Counts the rows that it sees, in its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, features):
        self.seen += len(features)
        return self.linear(features)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return features, torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)


def one_step(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    features, target = data()
    mse_loss(model(features), target).backward()
    optimizer.step()


def gradient(model: Model) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters()])


def same(got: torch.Tensor, expected: torch.Tensor) -> str:
    error = ((got - expected).norm() / expected.norm()).item()
    return "equal" if error < 1e-12 else f"off by {error:.3f} of its length"


# ------------------------------------------- "each replica's parameters are thrown away"


def update_by_hand() -> None:
    """No optimizer step: a loop over `module.children()`, said to reach the replicas only."""
    model, stepped = Model(), Model()
    parallel = nn.DataParallel(model)
    features, target = data()
    mse_loss(parallel(features), target).backward()
    with torch.no_grad():
        for child in parallel.module.children():
            for parameter in child.parameters():
                parameter -= 0.01 * parameter.grad
    one_step(stepped)
    is_it = next(parallel.module.children()) is model.linear
    print(f"  module.children() are the model's own layers: {is_it}")
    equal = same(model.linear.weight, stepped.linear.weight)
    print(f"  the weights afterwards, beside those of optimizer.step(): {equal}")


# ----------------------------------------------------------------------------- replicas


def replicas_of(model: Model) -> list[Model]:
    """As torch.nn.parallel.replicate makes them: the first shares its tensors with the model,
    the others hold copies, and gradients flow through all of them into the model."""
    replicas = []
    for number in range(len(SHARES)):
        replica, linear = (each._replicate_for_data_parallel() for each in (model, model.linear))
        for name, parameter in model.linear.named_parameters():
            setattr(
                linear, name, parameter.view_as(parameter) if number == 0 else parameter.clone()
            )
        replica.linear = linear
        replica.seen = model.seen if number == 0 else model.seen.clone()
        replicas.append(replica)
    return replicas


def through_replicas(loss_inside: bool) -> Model:
    model = Model()
    features, target = data()
    outputs = [
        replica(features[rows]) for replica, rows in zip(replicas_of(model), SHARES, strict=True)
    ]
    if loss_inside:
        losses = [mse_loss(o, target[rows]) for o, rows in zip(outputs, SHARES, strict=True)]
        torch.stack(losses).mean().backward()
    else:
        mse_loss(torch.cat(outputs), target).backward()
    return model


def show_replicas() -> None:
    true = Model()
    one_step(true)
    print(f"  rows that the model counted in its forward: {true.seen:.0f} in one process", end="")
    model = through_replicas(loss_inside=False)
    print(f", {model.seen:.0f} with replicas")
    print(f"  gradient, loss of the gathered outputs: {same(gradient(model), gradient(true))}")
    halved = gradient(model) / len(SHARES)
    print(f"  the same, averaged over the replicas:   {same(halved, gradient(true))}")
    model = through_replicas(loss_inside=True)
    print(f"  gradient, mean of each replica's loss:  {same(gradient(model), gradient(true))}")


# ------------------------------------------------------------------------------ lockstep


class Counting(TrainingOperator):
    """Four rows for each worker: one gets four, the other three."""

    def setup(self, config):
        model = Model()
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.01)
        )
        self.register_data(train_loader=DataLoader(TensorDataset(*data()), batch_size=4))

    def compute_loss(self, batch, batch_info):
        features, target = batch
        loss = mse_loss(self.model(features), target)
        return loss, {"mean_feature": features.mean()}


def with_lockstep() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    true = Model()
    one_step(true)
    with TorchTrainer(training_operator_cls=Counting, num_workers=2) as trainer:
        result = trainer.train()
        model = trainer.get_model()
    print(f"  weights after the step: {same(model.linear.weight, true.linear.weight)}")
    print(f"  num_samples: {result['num_samples']}")
    mean = torch.tensor(result["mean_feature"], dtype=torch.float64)
    print(f"  mean_feature, over both workers: {same(mean, data()[0].mean())}")


def main() -> None:
    print("weights updated by hand, without optimizer.step()")
    update_by_hand()
    print("replicas")
    show_replicas()
    print("lockstep, two workers")
    with_lockstep()


if __name__ == "__main__":
    main()
