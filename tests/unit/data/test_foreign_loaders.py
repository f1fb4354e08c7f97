# SPDX-License-Identifier: Apache-2.0
"""Hugging Face datasets and torchdata's loader: shared out exactly, and read from any position.

The loaders of other packages in `lockstep.data.sharded_loader` and `lockstep.data.shard_loader`.
"""

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lockstep import TorchTrainer, TrainingOperator
from lockstep.data import BatchParts, ShardAssignment, ShardedLoader
from lockstep.errors import NotShardableError
from sharing import by_shard, share_out

pytestmark = pytest.mark.filterwarnings(
    # torchdata's use of older torch, and Hugging Face's of older pyarrow.
    "ignore::UserWarning",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)

ROWS = 23


def table():
    rows = {"id": list(range(ROWS)), "x": [[i / 10, (i % 5) / 5] for i in range(ROWS)]}
    return datasets.Dataset.from_dict(rows).with_format("torch")


def stream():
    return table().to_iterable_dataset(num_shards=3).with_format("torch")


def shuffled_stream():
    return stream().shuffle(seed=4, buffer_size=7)


LOADERS = {
    "table": lambda: DataLoader(table(), batch_size=4),
    "shuffled table": lambda: DataLoader(table(), batch_size=4, shuffle=True),
    "mapped table": lambda: DataLoader(table().map(lambda row: row), batch_size=4),
    "stream": lambda: DataLoader(stream(), batch_size=4),
    "shuffled stream": lambda: DataLoader(shuffled_stream(), batch_size=4),
    "stateful": lambda: StatefulDataLoader(table(), batch_size=4),
    "stateful, shuffled": lambda: StatefulDataLoader(table(), batch_size=4, shuffle=True),
    "stateful, with processes": lambda: StatefulDataLoader(
        table(), batch_size=4, shuffle=True, num_workers=2
    ),
    "stateful, over a stream": lambda: StatefulDataLoader(shuffled_stream(), batch_size=4),
}
SLOW = LOADERS.keys() - {"shuffled table", "shuffled stream", "stateful, shuffled"}
CASES = [
    pytest.param(make, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name, make in LOADERS.items()
]


def ids(workers):
    return [
        number
        for steps in workers
        for step in steps
        for part in step.parts
        for number in part.batch["id"].tolist()
    ]


def shares(make, num_workers, **where):
    workers = share_out(make, 3, num_workers, **where)
    return {place: batch["id"] for place, batch in _by_shard(workers).items()}


def _by_shard(workers):
    return {place: {"id": batch["id"].tolist()} for place, batch in by_shard(workers).items()}


@pytest.mark.parametrize("make", CASES)
def test_every_row_once_and_the_same_at_any_number_of_workers(make):
    whole = share_out(make, 3, 3)
    assert sorted(ids(whole)) == list(range(ROWS))
    for num_workers in (1, 2):
        assert shares(make, num_workers) == shares(make, 3)


@pytest.mark.parametrize("make", CASES)
def test_an_epoch_is_entered_in_its_middle(make):
    whole = shares(make, 2)
    rest = shares(make, 2, start_step=1)
    assert rest == {place: rows for place, rows in whole.items() if place[0] >= 1}


@pytest.mark.parametrize("name", ["shuffled table", "shuffled stream", "stateful, shuffled"])
def test_epochs_have_orders_of_their_own(name):
    assert shares(LOADERS[name], 2, epoch=0) != shares(LOADERS[name], 2, epoch=1)
    assert shares(LOADERS[name], 2, epoch=1) == shares(LOADERS[name], 1, epoch=1)


def test_torchdatas_loader_reads_what_torchs_reads():
    plain, stateful = LOADERS["shuffled table"], LOADERS["stateful, shuffled"]
    assert shares(stateful, 2) == shares(plain, 2)
    seeded = [
        shares(
            lambda kind=kind, seed=seed: kind(
                table(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed)
            ),
            2,
        )
        for kind, seed in ((DataLoader, 5), (StatefulDataLoader, 5), (StatefulDataLoader, 6))
    ]
    assert seeded[0] == seeded[1] != seeded[2]


def test_a_loader_that_was_asked_for_its_state_reads_all():
    def asked():
        loader = StatefulDataLoader(table(), batch_size=4)
        loader.state_dict()
        return loader

    assert sorted(ids(share_out(asked, 2, 2))) == list(range(ROWS))


def test_what_is_shared_out_or_entered_already_is_refused():
    assignment = ShardAssignment(2, range(2), 0)
    half = DataLoader(split_dataset_by_node(stream(), rank=0, world_size=2), batch_size=4)
    with pytest.raises(NotShardableError, match="split_dataset_by_node"):
        ShardedLoader(half, assignment, parts=BatchParts.BY_SHARD)
    loader = StatefulDataLoader(table(), batch_size=4)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(NotShardableError, match="load_state_dict"):
        ShardedLoader(loader, assignment, parts=BatchParts.BY_SHARD)


class BeginsAnew:
    """Itself an iterator, which begins anew with each `iter`: as Lightning's `CombinedLoader`."""

    def __iter__(self):
        self.batches = iter(torch.arange(10).split(3))
        return self

    def __next__(self):
        return next(self.batches)


class Rereads:
    """As the error advises."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


def test_a_loader_that_is_its_own_iterator_is_read_through_a_class_around_it():
    with pytest.raises(NotShardableError, match=r"yield from self\.loader"):
        share_out(BeginsAnew, 1, 1)
    for epoch in range(2):
        (steps,) = share_out(lambda: Rereads(BeginsAnew()), 1, 1, epoch=epoch)
        read = [part.batch for step in steps for part in step.parts]
        assert torch.cat(read).tolist() == list(range(10))


class Regression(TrainingOperator):
    def setup(self, config):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.register(models=self.model, optimizers=self.optimizer)
        self.register_data(train_loader=LOADERS[config["loader"]]())

    def compute_loss(self, batch, batch_info):
        return (self.model(batch["x"]).squeeze(1) - batch["id"]).square().mean()


@pytest.mark.parametrize(
    "name",
    [
        "shuffled table",
        "stateful, shuffled",
        pytest.param("shuffled stream", marks=[pytest.mark.slow]),
        pytest.param("stateful, over a stream", marks=[pytest.mark.slow]),
    ],
)
def test_a_run_goes_on_from_the_middle_of_an_epoch_to_the_same_bits(name, tmp_path):
    def trainer():
        return TorchTrainer(training_operator_cls=Regression, num_shards=2, config={"loader": name})

    with trainer() as undisturbed:
        for steps in (4, 3):
            undisturbed.train(num_steps=steps)
        expected = undisturbed.get_model().state_dict()
    with trainer() as first:
        first.train(num_steps=4)
        path = first.save(tmp_path / "middle")
    with trainer() as second:
        second.load(path)
        second.train(num_steps=3)
        found = second.get_model().state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
