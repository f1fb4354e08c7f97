# SPDX-License-Identifier: Apache-2.0
"""Batches that are lists of samples are counted, joined and emptied sample by sample.

`lockstep.data.sample_lists`, in the runs in which it was missing.
"""

import pytest
import torch
from tests.unit.trainer.programs import same, weights
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset

import lockstep
from harness import run_ranks
from lockstep import TorchTrainer, TrainingOperator
from lockstep.data.batch_join import join_batches
from lockstep.data.sample_lists import Members, members_of, sample_lists
from lockstep.errors import NotShardableError, WeightError
from lockstep.keys import WEIGHT

LENGTHS = (7, 4, 5, 2, 6, 3)
GENERATOR = torch.Generator().manual_seed(3)
SEQUENCES = [torch.randn(length, 3, generator=GENERATOR, dtype=torch.float64) for length in LENGTHS]


def linear():
    model = nn.Linear(3, 1, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    return model


def loss_of(model, sequences):
    """A mean over sequences, whatever their lengths."""
    return torch.stack([(model(each).mean() - 1).square() for each in sequences]).mean()


def one_process(*steps):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for sequences in steps:
        optimizer.zero_grad()
        loss_of(model, sequences).backward()
        optimizer.step()
    return weights(model)


class Sequences(TrainingOperator):
    def setup(self, config):
        model = linear()
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        self.register_data(train_loader=config["loader"])

    def compute_loss(self, batch, batch_info):
        return loss_of(self.model, self.config.get("read", list)(batch))


class OwnStep(Sequences):
    """Takes all shards of its worker as one batch."""

    def train_batch(self, batch, batch_info):
        return super().train_batch(self.config.get("cut", list)(batch), batch_info)


def trained(operator, loader, *, config=None, **arguments):
    with TorchTrainer(
        training_operator_cls=operator, config={"loader": loader, **(config or {})}, **arguments
    ) as trainer:
        result = trainer.train()
        return weights(trainer.get_model()), result["num_samples"]


class Opaque:
    """A batch of a class of its own, with a length that is not its samples."""

    def __init__(self, sequences):
        self.sequences = sequences

    def __len__(self):
        return 2


LAYOUTS = {
    "a list": (list, list),
    "a tuple of tuples": (lambda batch: tuple(zip(*[(s, 1) for s in batch], strict=True)), "first"),
    "packed": (lambda batch: pack_sequence(batch, enforce_sorted=False), unpack_sequence),
    "an object": (Opaque, lambda batch: batch.sequences),
    "a dict": (lambda batch: {"sequences": batch, "size": (3, 3)}, "sequences"),
}


def reader(read):
    named = {"first": lambda batch: batch[0], "sequences": lambda batch: batch["sequences"]}
    return named.get(read, read) if isinstance(read, str) else read


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_workers_own_batch_counts_for_the_samples_that_its_loader_asked_for(layout):
    """A window of four sequences and of two is a mean over six."""
    collate, read = LAYOUTS[layout]
    loader = DataLoader(SEQUENCES, batch_size=4, collate_fn=collate)
    got, counted = trained(
        Sequences, loader, config={"read": reader(read)}, accumulate=2, add_dist_sampler=False
    )
    assert counted == 6
    assert same(got, one_process(SEQUENCES))


def test_a_workers_own_list_of_one_sample_counts_for_one():
    loader = DataLoader(SEQUENCES, batch_size=1, collate_fn=list)
    got, counted = trained(Sequences, loader, accumulate=6, add_dist_sampler=False)
    assert counted == 6
    assert same(got, one_process(SEQUENCES))


def test_a_ready_batch_of_an_unknown_class_is_not_counted_by_its_length():
    loader = [Opaque(SEQUENCES[:4]), Opaque(SEQUENCES[4:])]
    for arguments in ({}, {"add_dist_sampler": False}):
        with pytest.raises(NotShardableError, match="DataLoader"):
            trained(Sequences, loader, **arguments)


def test_ready_batches_that_are_lists_of_samples_are_not_joined_member_by_member():
    """They were two sequences, each of two behind each other; of a longer list some vanished."""
    loader = [SEQUENCES[:2], SEQUENCES[2:4]]
    with pytest.raises(NotShardableError, match="samples or columns"):
        trained(OwnStep, loader, num_shards=2)


def test_columns_that_are_alike_are_joined_in_ready_batches():
    pairs = [(torch.full((rows, 1), 1.0 * rows), torch.full((rows, 1), -1.0)) for rows in (3, 2)]
    features, targets = join_batches(pairs, [None, None])
    assert features.flatten().tolist() == [3.0] * 3 + [2.0] * 2
    assert targets.shape == (5, 1)


class Weighed(Sequences):
    def compute_loss(self, batch, batch_info):
        return super().compute_loss(batch, batch_info), {WEIGHT: len(batch)}


def left_out(batch):
    return [each for each in batch if len(each) != 2]


@pytest.mark.parametrize(
    ("loader", "arguments"),
    [
        ([SEQUENCES[:3], SEQUENCES[4:]], {"num_shards": 2}),
        ([SEQUENCES[:3], SEQUENCES[4:]], {"add_dist_sampler": False, "accumulate": 2}),
        (
            DataLoader(SEQUENCES, batch_size=4, collate_fn=left_out),
            {"add_dist_sampler": False, "accumulate": 2},
        ),
    ],
)
def test_a_list_of_samples_whose_number_is_unknown_has_to_say_what_it_counts_for(loader, arguments):
    """It counted for the steps of its first sequence."""
    with pytest.raises(WeightError, match="lengths"):
        trained(Sequences, loader, **arguments)
    got, _ = trained(Weighed, loader, **arguments)
    assert same(got, one_process([*SEQUENCES[:3], *SEQUENCES[4:]]))


class ReadsLists(Dataset):
    """Is asked for a list of samples at once."""

    def __getitem__(self, indices):
        return {"s": [SEQUENCES[index] for index in indices], "size": (3, 3, 1)}


def test_lists_of_samples_are_joined_behind_each_other_where_their_number_is_known():
    sampler = BatchSampler(range(6), 2, drop_last=False)
    loader = DataLoader(ReadsLists(), batch_size=None, sampler=sampler)

    def checked(batch):
        assert [*batch["size"]] == [3, 3, 1]
        assert len(batch["s"]) in (2, 4)
        return batch["s"]

    got, counted = trained(OwnStep, loader, config={"cut": checked}, num_shards=2)
    assert counted == 6
    assert same(got, one_process(SEQUENCES[:4], SEQUENCES[4:]))


@pytest.mark.parametrize("first", [4, 7])
@pytest.mark.parametrize("kept", [3, 4])
def test_a_step_of_ones_own_may_cut_sequences_and_leave_some_out(first, kept):
    """Also where the first sequence of each batch is as long as there are samples."""
    sequences = [*SEQUENCES]
    for place, length in ((0, first), (4, first - 2)):
        sequences[place] = torch.ones(length, 3, dtype=torch.float64)

    def cut(batch):
        return [each[:2] for each in batch[:kept]]

    loader = DataLoader(sequences, batch_size=4, collate_fn=list)
    got, _ = trained(OwnStep, loader, config={"cut": cut}, accumulate=2)
    assert same(got, one_process(cut(sequences[:4]) + cut(sequences[4:])))


def test_rows_cut_from_what_may_be_either_are_refused():
    """Two sequences of two steps, or two columns of two rows."""
    loader = DataLoader([each[:2] for each in SEQUENCES[:2]], batch_size=2, collate_fn=list)
    config = {"cut": lambda batch: [each[:1] for each in batch]}
    with pytest.raises(WeightError, match="is not known"):
        trained(OwnStep, loader, config=config)


CLOUDS = {
    "a list": (list, lambda batch: batch),
    "a tuple of tuples": (
        lambda batch: tuple(zip(*[(s, torch.tensor(1.0)) for s in batch], strict=True)),
        lambda batch: batch[0],
    ),
    "a dict": (lambda batch: {"s": batch, "size": (224, 224)}, lambda batch: batch["s"]),
}


@pytest.mark.parametrize("layout", CLOUDS)
def test_a_rank_without_samples_has_none_in_its_list(layout):
    """It had one empty sample, and the step's gradient was half of the true one."""
    collate, read = CLOUDS[layout]

    def body(group):
        model = linear()
        gradients = lockstep.replicate(model, group=group)
        loader = DataLoader(SEQUENCES[:3], batch_size=1, collate_fn=collate)
        sizes = []
        for batch in lockstep.shard_loader(loader, group=group):
            sequences = read(batch)
            if isinstance(batch, dict):
                assert batch["size"] == (224, 224)
            loss = sum((model(each).sum() - 1).square() for each in sequences)
            loss = loss / max(len(sequences), 1) + 0.0 * sum(p.sum() for p in model.parameters())
            model.zero_grad()
            gradients.backward(loss, weight=len(sequences))
            sizes.append(len(sequences))
        gradients.detach()
        return sizes, [parameter.grad.clone() for parameter in model.parameters()]

    alone = linear()
    (alone(SEQUENCES[2]).sum() - 1).square().backward()
    for rank, (sizes, grads) in enumerate(run_ranks(2, body)):
        assert sizes == [[1, 1], [1, 0]][rank]
        for grad, parameter in zip(grads, alone.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-12, atol=0)


class Second:
    rank, size = 1, 2


def empty_of(batch):
    """What the second of two ranks gets in the only step of one sample."""
    loader = DataLoader([0], batch_size=1, collate_fn=lambda _: batch)
    (got,) = lockstep.shard_loader(loader, group=Second())
    return got


def test_an_empty_batch_of_columns_has_none_of_their_rows():
    got = empty_of((torch.ones(1, 3), ["name"], {"y": torch.ones(1)}, ("a", "b")))
    assert [len(got[0]), len(got[1]), len(got[2]["y"])] == [0, 0, 0]
    assert got[3] == ("a", "b")
    assert got[0].shape == (0, 3)


def test_one_member_with_one_row_may_be_a_sample_and_a_column():
    for batch in ([torch.ones(1, 3)], {"x": (torch.ones(1, 3),)}):
        with pytest.raises(NotShardableError, match="samples or columns"):
            empty_of(batch)
    (got,) = lockstep.shard_loader(DataLoader([(torch.ones(3),)]), group=Second())
    assert got[0].shape == (0, 3)


def rows(*lengths, dtype=torch.float32):
    return [torch.ones(length, 2, dtype=dtype) for length in lengths]


@pytest.mark.parametrize(
    ("tree", "num_samples", "members"),
    [
        (rows(4, 4), 4, Members.COLUMNS),
        (rows(2, 2), 2, Members.EITHER),
        (rows(3, 5), 2, Members.SAMPLES),
        ([torch.ones(2, 2), torch.ones(2)], 2, Members.COLUMNS),
        ([torch.tensor(1.0), torch.tensor(2.0)], 2, Members.SAMPLES),
        ([object(), object()], 2, Members.SAMPLES),
        ([{"x": torch.ones(3)}, {"x": torch.ones(3)}], 2, Members.SAMPLES),
        ([{"x": torch.ones(2)}, {"x": torch.ones(2)}], 2, Members.EITHER),
        ([(torch.ones(3, 2), 0), (torch.ones(3, 2), 1)], 2, Members.EITHER),
        ([pack_sequence(rows(2, 1))] * 2, 2, Members.EITHER),
        ({"a": torch.ones(3), "b": torch.ones(3)}, 2, Members.COLUMNS),
        (rows(4, 4), None, Members.EITHER),
        (rows(4), None, Members.COLUMNS),
        ([torch.ones(4, 2), torch.ones(4, 1)], None, Members.COLUMNS),
    ],
)
def test_what_the_members_of_a_list_are(tree, num_samples, members):
    assert members_of(tree, num_samples) is members


def test_where_samples_are_listed():
    batch = {"x": torch.ones(2, 3), "boxes": (rows(3, 1), ("a", "b"))}
    ((path, members),) = sample_lists(batch, 2)
    assert ("".join(map(str, path)), members) == ("['boxes'][0]", Members.SAMPLES)
    assert not [*sample_lists(batch, 3)]
