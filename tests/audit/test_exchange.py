# SPDX-License-Identifier: Apache-2.0
"""How ranks tell one another what they saw, through a real store (`lockstep.audit.session`)."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch.distributed as dist

from audit.ledgers import of_one_step
from lockstep.audit.judgement import judge
from lockstep.audit.session import exchange_by_store, leave_exchange, ledgers_of_all

OVER_8_MIB = (8 << 20) + 1
WAIT_S = 60.0


def _stores():
    """Of two ranks: one holds it, the other is connected with it."""
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return held, dist.TCPStore("127.0.0.1", held.port, is_master=False, wait_for_workers=False)


@pytest.fixture
def stores():
    return _stores()


def test_records_of_any_size_arrive(stores):
    of_each = [b"a" * OVER_8_MIB, b"b"], [b"", b"c" * (1 << 20)]
    with ThreadPoolExecutor(2) as ranks:
        for records in of_each:
            waiting = [
                ranks.submit(exchange_by_store, data, store, rank, 2, WAIT_S)
                for rank, (data, store) in enumerate(zip(records, stores, strict=True))
            ]
            for each in waiting:
                assert each.result() == [data or None for data in records]


def test_a_rank_that_leaves_an_exchange_brings_nothing(stores):
    leave_exchange(stores[1], 1, 2)
    assert exchange_by_store(b"a", stores[0], 0, 2, WAIT_S) == [b"a", None]


def test_a_store_that_is_gone_is_a_finding_and_no_error():
    held, store = _stores()
    del held
    with suppress(RuntimeError):
        store.set("the connection is", "broken")
    ledger = of_one_step(1, norm=1.0)
    ledgers = ledgers_of_all(ledger, store)
    assert [each.rank for each in ledgers] == [1]
    (finding,) = judge(ledgers)
    assert finding.code == "LS406"
    assert "rank 1 could not tell the others what it saw" in finding.message
