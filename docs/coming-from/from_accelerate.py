# SPDX-License-Identifier: Apache-2.0
"""The same training as a loop with Accelerate, with lockstep's loader, and as an operator."""

import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from problem import EPOCHS, GLOBAL_BATCH, WORKERS, data, make_model, say_distance
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from lockstep import TorchTrainer, TrainingOperator


def with_accelerate():
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for images, target in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), target))
            optimizer.step()
    return accelerator.unwrap_model(model)


def with_the_loop_kept():
    """Started by torchrun; the model stays what it is, and a short batch counts as short."""
    dist.init_process_group("gloo")
    model = make_model()
    gradients = lockstep.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = lockstep.shard_loader(DataLoader(data(), GLOBAL_BATCH // dist.get_world_size()))
    for _ in range(EPOCHS):
        for images, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), target)
            gradients.backward(loss, weight=len(target))
            optimizer.step()
    gradients.detach()
    return model


class Digits(TrainingOperator):
    def setup(self, config):
        self.model, self.optimizer, self.criterion = self.register(
            models=(model := make_model()),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            criterion=nn.CrossEntropyLoss(),
        )
        self.register_data(train_loader=DataLoader(data(), GLOBAL_BATCH // WORKERS))


def with_an_operator():
    with TorchTrainer(training_operator_cls=Digits, num_workers=WORKERS) as trainer:
        for _ in range(EPOCHS):
            trainer.train()
        return trainer.get_model()


def on_two_processes(path):
    """The two loops, started as `accelerate launch` and `torchrun` start them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(WORKERS), __file__, path]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    model = make_model()
    model.load_state_dict(torch.load(path))
    return model


def as_one_of_them(path):
    kept, accelerated = with_the_loop_kept(), with_accelerate()
    if dist.get_rank() == 0:
        say_distance(accelerated, kept)
        torch.save(accelerated.state_dict(), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        as_one_of_them(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            accelerated = on_two_processes(f"{folder}/model.pt")
        say_distance(accelerated, with_an_operator())
