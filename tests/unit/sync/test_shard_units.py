# SPDX-License-Identifier: Apache-2.0
"""Which submodules are units, and what cannot be one."""

import pytest
import torch
from torch import nn

from lockstep.errors import (
    ConfigurationError,
    NotAvailableError,
    SparseGradientError,
    WrongTypeError,
)
from lockstep.sync.shard_units import (
    check_policy,
    find_units,
    refuse_models,
    refuse_sparse,
    refuse_unmatched,
    refuse_unshardable,
)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 7, bias=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("shard", "names"),
    [
        ("auto", ["blocks.0", "blocks.1", "blocks.2"]),
        ("whole", []),
        ([nn.Embedding, Block], ["embedding", "blocks.0", "blocks.1", "blocks.2"]),
        (
            [nn.Linear],
            [*(f"blocks.{n}.layers.{place}" for n in range(3) for place in (0, 2)), "head"],
        ),
        (lambda module: isinstance(module, Block), ["blocks.0", "blocks.1", "blocks.2"]),
    ],
    ids=["auto", "whole", "classes", "inner_classes", "function"],
)
def test_they_are_the_outermost_ones_in_order(shard, names):
    assert list(find_units(Transformer(), shard)) == names


def test_tied_weights_stay_with_the_root():
    model = Transformer()
    model.blocks[1].layers[0].weight = model.blocks[0].layers[0].weight
    assert list(find_units(model, "auto")) == ["blocks.2"]
    with pytest.raises(ConfigurationError, match=r"blocks\.1\.layers\.0\.weight"):
        find_units(model, [Block])


def test_one_model_without_a_unit_is_fine_beside_another_that_has_some():
    """As a criterion with a weight; `no_units` alone would be a list of the wrong classes."""
    no_units = nn.Bilinear(2, 2, 1)
    refuse_unmatched([Transformer(), no_units], [Block])
    refuse_unmatched([no_units], "auto")
    with pytest.raises(ConfigurationError, match="no submodule"):
        refuse_unmatched([no_units, nn.Linear(2, 1)], [Block])


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_embedding_that_trains_is_refused(kind):
    model = Transformer()
    model.words = kind(7, 4, sparse=True)
    with pytest.raises(SparseGradientError, match=r"`words\.weight`"):
        refuse_sparse([model])
    model.words.requires_grad_(False)
    refuse_sparse([model])


def test_a_parameter_that_is_not_contiguous_is_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).to(
        memory_format=torch.channels_last
    )
    with pytest.raises(NotAvailableError, match=r"`0\.weight` has strides .*channels_last"):
        refuse_unshardable(model, find_units(model, "auto"))


def test_a_module_that_is_there_twice_is_one_unit():
    block = Block()
    assert list(find_units(nn.Sequential(block, block, Block()), "auto")) == ["0", "2"]


@pytest.mark.parametrize(
    ("shard", "error"),
    [
        ("half", ConfigurationError),
        (3, ConfigurationError),
        ([], ConfigurationError),
        ([nn.Linear(2, 2)], WrongTypeError),
        (nn.Linear, ConfigurationError),
    ],
    ids=["word", "number", "nothing", "instance", "class"],
)
def test_what_is_no_policy_is_refused(shard, error):
    with pytest.raises(error):
        check_policy(shard)


@pytest.mark.parametrize(
    "parameter",
    [torch.ones(()), torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.float64)],
    ids=["scalar", "complex", "two_dtypes"],
)
def test_a_parameter_that_has_no_rows_to_share_out_is_named(parameter):
    model = Transformer()
    model.extra = nn.Parameter(parameter)
    with pytest.raises(NotAvailableError, match="extra"):
        refuse_unshardable(model, find_units(model, "auto"))


def test_parameters_in_one_memory_are_refused():
    """Each would be cut up, and the tie lost; parts of one memory that lie apart are none."""
    model = Transformer()
    model.head.weight.data = model.embedding.weight.data
    with pytest.raises(NotAvailableError, match=r"`embedding\.weight` and `head\.weight`"):
        refuse_models([model])
    flat = torch.zeros(56)
    for weight, part in zip(
        (model.head.weight, model.embedding.weight), flat.split(28), strict=True
    ):
        weight.data = part.view(7, 4)
    refuse_models([model])


def test_models_that_share_a_weight_are_refused():
    one, two = Block(), Block()
    two.layers[0].weight = one.layers[0].weight
    with pytest.raises(ConfigurationError, match=r"layers\.0\.weight"):
        refuse_models([one, two])
