# SPDX-License-Identifier: Apache-2.0
"""The last worker that asked for a number of threads gives the program's number back."""

import pytest
import torch
from tests.unit.trainer.programs import trainer

from lockstep.worker.thread_limit import ThreadLimit


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_claims_that_overlap(threads, order):
    claims = ThreadLimit(), ThreadLimit()
    for claim in claims:
        claim.set(1)
    for place in order:
        assert torch.get_num_threads() == 1
        claims[place].release()
    assert torch.get_num_threads() == threads
    claims[0].release()
    assert torch.get_num_threads() == threads


def test_a_trainer_that_is_made_before_the_last_one_is_closed(threads):
    first, second = (trainer(reproducible=True) for _ in range(2))
    first.train(num_steps=1)
    second.train(num_steps=1)
    first.shutdown()
    assert torch.get_num_threads() == 1
    second.shutdown()
    assert torch.get_num_threads() == threads


def test_a_claim_that_nobody_gives_up_ends_with_its_worker(threads):
    dropped = ThreadLimit()
    dropped.set(1)
    del dropped
    torch.set_num_threads(threads)
    claim = ThreadLimit()
    claim.set(1)
    claim.release()
    assert torch.get_num_threads() == threads


def test_a_claim_that_stays_gets_its_own_number(threads):
    first, second = ThreadLimit(), ThreadLimit()
    first.set(2)
    second.set(1)
    second.release()
    assert torch.get_num_threads() == 2
    first.release()
