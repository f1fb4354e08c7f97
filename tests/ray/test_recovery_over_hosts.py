# SPDX-License-Identifier: Apache-2.0
"""Workers die while large sums go within hosts and between them, and the run ends as undisturbed.

The hosts are names, which the workers' NCCL_HOSTID says.
"""

import os
import threading
from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator
from lockstep.keys import BATCH_SIZE
from lockstep.testing import Strike, struck

pytestmark = pytest.mark.timeout(240)

WIDTH = 1050
"""Of a weight of 8.8 MB: the least that goes over hosts is 8 MiB."""


class Wide(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
            criterion=nn.MSELoss(),
        )
        drawn = torch.Generator().manual_seed(0)
        x = torch.randn(96, 8, generator=drawn, dtype=torch.float64)
        y = torch.randn(96, WIDTH, generator=drawn, dtype=torch.float64)
        self.register_data(train_loader=DataLoader(TensorDataset(x, y), config[BATCH_SIZE]))


class OnHosts:
    """Workers are on the hosts `names` in the order in which they start."""

    def __init__(self, folder, names):
        self.folder, self.names = str(folder), names

    def __call__(self):
        for number in count():
            try:
                os.mkdir(os.path.join(self.folder, str(number)))
            except FileExistsError:
                continue
            os.environ["NCCL_HOSTID"] = self.names[number]
            return


def trained(folder, strikes, names="abab", **arguments):
    """The weights, the run's status, and by rank whether sums have gone over hosts."""
    folder.mkdir()
    with TorchTrainer(
        training_operator_cls=struck(Wide, *strikes) if strikes else Wide,
        num_workers=4,
        num_shards=4,
        config={BATCH_SIZE: 12},
        num_cpus_per_worker=0.5,
        initialization_hook=OnHosts(folder, names),
        **arguments,
    ) as trainer:
        trainer.train()
        assert trainer.status()["step"] == 8
        has_threads = trainer.apply_all_workers(has_threads_for_sums)
        return trainer.get_model().state_dict(), trainer.status(), has_threads


def has_threads_for_sums():
    return any(one.name.startswith("lockstep-all-reduce") for one in threading.enumerate())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "names", "spares"),
    [("backward", "abab", 0), ("buckets", "ababb", 1)],
)
def test_the_weights_are_those_of_an_undisturbed_run(tmp_path, phase, names, spares):
    """Three workers go on with the backend's sums; a spare may make the hosts even again."""
    expected, _, on_hosts = trained(tmp_path / "undisturbed", [])
    assert on_hosts == [True] * 4
    strikes = [Strike("kill", rank=3, step=4, phase=phase)]
    got, status, _ = trained(tmp_path / "killed", strikes, names, spare_workers=spares)
    (recovery,) = status["recoveries"]
    assert recovery["workers"] == 3 + spares
    assert max(float((got[name] - expected[name]).abs().max()) for name in expected) <= 1e-12
