# SPDX-License-Identifier: Apache-2.0
"""A shard's batch size carries the global batch size through arithmetic, copies and pickles."""

import copy
import pickle

import pytest
from torch.utils.data import DataLoader

from lockstep.data import ShardBatchSize, split_batch_size
from lockstep.errors import ConfigurationError


def test_shares_add_up_to_the_whole() -> None:
    for whole in range(1, 60):
        for num_shards in range(1, min(whole, 9) + 1):
            shares = [split_batch_size(whole, num_shards, s) for s in range(num_shards)]
            assert sum(shares) == whole
            assert max(shares) - min(shares) <= 1
            assert shares == sorted(shares, reverse=True)
            assert {share.whole for share in shares} == {whole}


def test_21_over_2_is_11_and_10() -> None:
    assert [int(split_batch_size(21, 2, shard)) for shard in (0, 1)] == [11, 10]


def test_resizing_keeps_100() -> None:
    """The old rule rounded down and wrote back: 100 over 8, 3, 7, 2 became 96, 96, 91, 90."""
    whole = 100
    for num_shards in (8, 3, 7, 2):
        shares = [split_batch_size(whole, num_shards, s) for s in range(num_shards)]
        assert sum(shares) == 100
        whole = shares[0].whole
    assert whole == 100


def test_fewer_samples_than_shards_is_not_zero() -> None:
    """The old rule gave 0, which is falsy, and every worker took the whole batch."""
    shares = [split_batch_size(2, 5, shard) for shard in range(5)]
    assert [int(share) for share in shares] == [1, 1, 1, 1, 1]
    assert {share.whole for share in shares} == {2}


@pytest.mark.parametrize("whole", [0, -3, 2.5, "8", True, None])
def test_what_is_no_batch_size_is_refused(whole: object) -> None:
    with pytest.raises(ConfigurationError, match=r"expected an integer of at least 1"):
        split_batch_size(whole, 2, 0)


def test_scaling_keeps_the_whole_in_step() -> None:
    share = split_batch_size(21, 2, 0)
    assert (share * 2, (share * 2).whole) == (22, 42)
    assert (2 * share, (2 * share).whole) == (22, 42)
    assert (share // 2, (share // 2).whole) == (5, 10)
    small = split_batch_size(4, 4, 3)
    assert (small // 2, (small // 2).whole) == (1, 2)


def test_other_arithmetic_is_an_int() -> None:
    share = split_batch_size(21, 2, 0)
    for value in (share + 1, share - 1, -share, share * 0, share // 100, share * share):
        assert type(value) is int
    assert share * 1.5 == 16.5
    assert share / 2 == 5.5
    assert [0] * share == [0] * 11


def test_copies_and_pickles_remember() -> None:
    share = split_batch_size(21, 2, 1)
    for twin in (copy.copy(share), copy.deepcopy(share), pickle.loads(pickle.dumps(share))):
        assert (int(twin), twin.whole) == (10, 21)
    nested = copy.deepcopy({"*batch_size": share})["*batch_size"]
    assert isinstance(nested, ShardBatchSize)
    assert split_batch_size(share, 3, 0).whole == 21


def test_a_loader_keeps_the_object() -> None:
    assert DataLoader(range(50), batch_size=split_batch_size(21, 2, 0)).batch_size.whole == 21
