# SPDX-License-Identifier: Apache-2.0
"""A fixed sample of random programs: each is exact, or refused with a code that a table explains.

Each piece under each way to synchronise, then random combinations that hold many pairs. `make
soak` draws fresh ones.
"""

import warnings

import pytest
import torch

from soak.drawing import named
from soak.pool import Member
from soak.running import Runner, source_of
from soak.sample import every_piece, sample, singles

SINGLES = singles()
RANDOM = sample(120)


@pytest.fixture(scope="module")
def runner():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Runner()
    yield made
    made.close()
    torch.set_num_threads(threads)


def exact_or_refused(runner, spec):
    with warnings.catch_warnings():
        # Of torch, about programs that are meant to be odd.
        warnings.simplefilter("ignore")
        outcome = runner.run(spec)
    assert not runner.is_tainted
    assert not outcome.fails, f"{outcome.kind}: {outcome.what}\n{outcome.text}\n\n{source_of(spec)}"
    return outcome


@pytest.mark.sampled
@pytest.mark.parametrize(("sync", "piece"), [name.split("-", 1) for name in SINGLES])
def test_each_piece_by_itself(runner, sync, piece):
    outcome = exact_or_refused(runner, SINGLES[f"{sync}-{piece}"])
    # Who changes a piece so that it says nothing any more hears of it.
    assert outcome.kind != "discarded", outcome.what


@pytest.mark.parametrize("name", RANDOM)
def test_pieces_together(runner, name):
    exact_or_refused(runner, named(name))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(25))
def test_in_shards(runner, number):
    exact_or_refused(runner, named(f"shards:{number}", sync="fsdp"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_ray_with_deaths():
    member = Member()
    try:
        for number in range(4):
            spec = named(f"sample:ray{number}")
            outcome = member.run(spec)
            assert not outcome.fails, f"{outcome}\n\n{spec}\n\n{source_of(spec)}"
    finally:
        member.leave()


def test_every_piece_is_in_the_sample():
    held = set.union(*(spec.pieces() for spec in SINGLES.values()))
    assert every_piece() <= held
