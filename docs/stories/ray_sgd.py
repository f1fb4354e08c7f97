# SPDX-License-Identifier: Apache-2.0
"""RaySGD's page followed today: its trainer is gone, and what it did under the hood by hand.

python docs/stories/ray_sgd.py
"""

import importlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from two_ranks import RANKS, on_two_ranks

import ray
from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE

ROWS, GLOBAL_BATCH, EPOCHS = 7, 5, 5


class LearnedNoise(nn.Module):
    """A loss with a parameter: squared errors under a variance that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output, target):
        errors = (output - target).square() * torch.exp(-self.log_variance)
        return errors.mean() + self.log_variance


def make_parts():
    torch.manual_seed(0)
    model, criterion = nn.Linear(3, 1, dtype=torch.float64), LearnedNoise()
    parameters = [*model.parameters(), *criterion.parameters()]
    return model, criterion, torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(features, torch.randn(ROWS, 1, generator=generator, dtype=torch.float64))


def result_of(model, criterion, num_samples, val_loss) -> dict:
    weights = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    noise = criterion.log_variance.item()
    return {"num": num_samples, "val_loss": val_loss, "weights": weights, "noise": noise}


def by_hand(rank: int) -> dict:
    """As that page says: DDP around the model, a distributed sampler, `BATCH_SIZE //
    num_workers` rows a worker, results averaged over batches, then over workers."""
    model, criterion, optimizer = make_parts()
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(data(), shuffle=False)
    loader = DataLoader(data(), batch_size=GLOBAL_BATCH // RANKS, sampler=sampler)
    for _ in range(EPOCHS):
        for features, target in loader:
            optimizer.zero_grad()
            criterion(ddp(features), target).backward()
            optimizer.step()
    with torch.no_grad():
        losses = [criterion(model(features), target).item() for features, target in loader]
    return result_of(model, criterion, len(sampler), sum(losses) / len(losses))


def one_process() -> dict:
    model, criterion, optimizer = make_parts()
    for _ in range(EPOCHS):
        for features, target in DataLoader(data(), batch_size=GLOBAL_BATCH):
            optimizer.zero_grad()
            criterion(model(features), target).backward()
            optimizer.step()
    with torch.no_grad():
        features, target = data().tensors
        return result_of(model, criterion, ROWS, criterion(model(features), target).item())


class Regression(TrainingOperator):
    def setup(self, config):
        model, criterion, optimizer = make_parts()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=criterion
        )
        loader = DataLoader(data(), batch_size=config[BATCH_SIZE])
        self.register_data(train_loader=loader, validation_loader=loader)


def with_lockstep() -> list[dict]:
    """Each worker's own model and criterion."""
    with TorchTrainer(
        training_operator_cls=Regression, num_workers=RANKS, config={BATCH_SIZE: GLOBAL_BATCH}
    ) as trainer:
        for _ in range(EPOCHS):
            num_samples = trainer.train()["num_samples"]
        val_loss = trainer.validate()["val_loss"]
        return trainer.apply_all_operators(
            lambda operator: result_of(operator.model, operator.criterion, num_samples, val_loss)
        )


def away(first: dict, second: dict, *names: str) -> str:
    pairs = (zip(_row(first[name]), _row(second[name]), strict=True) for name in names)
    distance = max(abs(a - b) for pair in pairs for a, b in pair)
    return "none" if distance < 1e-12 else f"{distance:.4f}"


def _row(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def main() -> None:
    try:
        importlib.import_module("ray.util.sgd")
    except (DeprecationWarning, ImportError) as error:
        print(f"import ray.util.sgd: {type(error).__name__}\n")
    ray.init(num_cpus=RANKS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    true = one_process()
    print(f"{'':40} by hand   lockstep")
    by_rank = (on_two_ranks(by_hand), with_lockstep())
    counts = [sum(each["num"] for each in by_rank[0]), by_rank[1][0]["num"]]
    rows = [
        (f"rows an epoch, of {ROWS}", [str(count) for count in counts]),
        ("criterion's parameter, between workers", [away(a, b, "noise") for a, b in by_rank]),
        ("the same, from one process", [away(a, true, "noise") for a, _ in by_rank]),
        ("weights, between workers", [away(a, b, "weights") for a, b in by_rank]),
        ("weights, from one process", [away(a, true, "weights") for a, _ in by_rank]),
    ]
    means = [{"val_loss": sum(each["val_loss"] for each in ranks) / RANKS} for ranks in by_rank]
    rows.append(("val_loss, from one process", [away(mean, true, "val_loss") for mean in means]))
    for name, cells in rows:
        print(f"{name:40} {cells[0]:9} {cells[1]}")


if __name__ == "__main__":
    main()
