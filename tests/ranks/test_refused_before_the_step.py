# SPDX-License-Identifier: Apache-2.0
"""What cannot be reduced is refused on every rank, before a weight moves."""

import pytest
import torch
from torch import nn

from ranks.programs import mlp
from ranks.ways import every_way, mean_square, our_buckets, refused

PARTS = (slice(0, 8), slice(8, 12), slice(6, 10))


def part_of(rank):
    return PARTS[rank.number]


def run(rank, how, loss, **kwargs):
    if how == "driven":
        rank.sync.backward(loss, weight=4, **kwargs)
    else:
        loss.backward(**kwargs)


@every_way
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("how", ["driven", "plain"])
def test_a_graph_of_a_reduced_gradient(way, how):
    def body(rank):
        try:
            run(rank, how, mean_square(rank.model, part_of(rank)), create_graph=True)
            penalty = sum(param.grad.square().sum() for param in rank.params)
            run(rank, how, mean_square(rank.model, part_of(rank)) + penalty)
            rank.optimizer.step()
        finally:
            for param in rank.params:
                param.grad = None  # a cycle, of which torch warns

    for error in refused(way, "LS101", body):
        assert "create_graph" in str(error)


@our_buckets
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_a_graph_of_a_reduced_gradient_where_a_rank_has_no_rows(way):
    def body(rank):
        if rank.number == 0:
            mean_square(rank.model).backward(create_graph=True)
        else:
            rank.sync.reduce_pending()
        rank.optimizer.step()

    for error in refused(way, "LS101", body):
        assert "create_graph" in str(error)


class Bag(nn.Module):
    """A table of sparse gradients, frozen at first."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)
        self.head = mlp()
        self.table.requires_grad_(False)

    def forward(self, x):
        return self.head(x + self.table((x[:, 0] > 0).long()))


@every_way
@pytest.mark.parametrize("how", ["driven", "plain"])
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_a_sparse_table_that_is_unfrozen_later(way, how, cap_mb):
    def body(rank):
        rank.plain.table.requires_grad_(True)
        run(rank, how, mean_square(rank.model, part_of(rank)))
        rank.optimizer.step()

    for error in refused(way, "LS103", body, build=Bag, bucket_cap_mb=cap_mb):
        assert "table.weight" in str(error)


@our_buckets
def test_a_sparse_table_that_one_rank_unfreezes(way):
    def body(rank):
        rank.plain.table.requires_grad_(rank.number == 1)
        run(rank, "driven", mean_square(rank.model, part_of(rank)))
        rank.optimizer.step()

    refused(way, "LS103", body, build=Bag)


@every_way
@pytest.mark.parametrize("how", ["driven", "plain"])
def test_ranks_that_run_backward_unequally_often(way, how):
    """The round of rank 0's second backward is the one of rank 1's next step."""

    def body(rank):
        for _ in range(2):
            rank.optimizer.zero_grad()
            for _ in range(2 - rank.number):
                run(rank, how, mean_square(rank.model, part_of(rank)))
            rank.optimizer.step()

    refused(way, "LS101", body, moved=True)


def doubled(plain, model):
    plain.double()


def reshaped(plain, model):
    plain[2].weight.data = torch.zeros(5, 6)
    plain[2].bias.data = torch.zeros(5)


@every_way
@pytest.mark.parametrize("change", [doubled, reshaped])
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_parameters_of_another_kind_than_when_they_were_attached(way, change, cap_mb):
    def body(rank):
        change(rank.plain, rank.model)
        x = torch.ones(2 + rank.number, 4, dtype=rank.plain[0].weight.dtype)
        rank.sync.backward(rank.model(x).square().mean(), weight=len(x))
        rank.optimizer.step()

    for error in refused(
        way,
        "LS101",
        body,
        build=lambda: mlp(),
        moved=True,
        bucket_cap_mb=cap_mb,
        before=lambda plain: plain.float(),
    ):
        assert "another shape, dtype or device" in str(error)


def grown(plain, model):
    """In a bucket of long gradients, with others behind it."""
    plain[0].weight.data = torch.zeros(20_010, 4)
    plain[0].bias.data = torch.zeros(20_010)
    plain[2].weight.data = torch.zeros(3, 20_010)


@every_way
@pytest.mark.parametrize("change", [doubled, grown])
def test_large_parameters_of_another_kind_than_when_they_were_attached(way, change):
    def body(rank):
        change(rank.plain, rank.model)
        x = torch.ones(2, 4, dtype=rank.plain[0].weight.dtype)
        rank.model(x).square().mean().backward()
        rank.optimizer.step()

    for error in refused(
        way,
        "LS101",
        body,
        build=lambda: mlp(20_000),
        moved=True,
        before=lambda plain: plain.float(),
    ):
        assert "another shape, dtype or device" in str(error)


@every_way
def test_a_gradient_that_a_copy_would_spread_over_the_old_shape(way):
    """One element, held by the program, in the place of several."""

    def body(rank):
        bias = rank.plain[2].bias
        bias.data = bias.data[:1].clone()
        x = torch.ones(2 + rank.number, 4)
        with rank.sync.no_sync():
            rank.sync.backward(rank.model(x).square().mean(), weight=len(x))
        held = bias.grad
        rank.sync.backward(rank.model(x).square().mean(), weight=len(x))
        assert held is not None
        rank.optimizer.step()

    for error in refused(way, "LS101", body, moved=True, before=lambda plain: plain.float()):
        assert "another shape, dtype or device" in str(error)


@our_buckets
def test_one_rank_alone_has_parameters_of_another_kind(way):
    def body(rank):
        if rank.number == 1:
            rank.plain.double()
        x = torch.ones(2, 4, dtype=rank.plain[0].weight.dtype)
        rank.sync.backward(rank.model(x).square().mean(), weight=2)
        rank.optimizer.step()

    for error in refused(way, "LS101", body, moved=True, before=lambda plain: plain.float()):
        assert "another shape, dtype or device" in str(error)


@every_way
def test_steps_whose_sum_is_that_of_one_step(way):
    """The rank in the middle finds its own number in the mean of all."""

    def body(rank):
        rank.sync.begin_step(rank.number + 4)
        mean_square(rank.model, part_of(rank)).backward()
        rank.optimizer.step()

    for error in refused(way, "LS101", body, size=3):
        assert "different" in str(error)
