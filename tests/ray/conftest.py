# SPDX-License-Identifier: Apache-2.0
"""One real Ray for the whole test run: starting it costs seconds, a test does not."""

import logging
import time

import pytest

import lockstep
import ray
from lockstep.engine import actor_pool


@pytest.fixture(scope="session", autouse=True)
def _cluster():
    ray.shutdown()  # an earlier test of this process may have left one of its own
    ray.init(
        num_cpus=4, resources={"lane": 2}, logging_level=logging.ERROR, include_dashboard=False
    )
    # Workers go from one trainer to the next: new processes would be most of the time.
    lockstep.prestart(num_workers=2, keep=True)
    yield
    ray.shutdown()


def pytest_collection_modifyitems(items):
    """Tests of two workers come first, and hand theirs on from one to the next."""
    items.sort(key=lambda item: item.get_closest_marker("other_workers") is not None)


@pytest.fixture(autouse=True)
def _gives_everything_back():
    """No test leaves an actor or a placement group behind, but for the workers that wait."""
    yield
    # The scheduler hears of the end of a process from the node, some milliseconds later.
    deadline = time.monotonic() + 30
    while _free() != 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _free() == 4, f"{4 - _free():g} CPUs are still held"


@pytest.fixture
def workers_end_with_their_trainer():
    """As for a user who did not ask for anything else."""
    lockstep.prestart(num_workers=2)
    yield
    lockstep.prestart(num_workers=2, keep=True)


def _free() -> float:
    waiting = sum(
        each.request.bundle.get("CPU", 0) * len(each.actors) for each in actor_pool.idle_pools
    )
    return ray.available_resources().get("CPU", 0) + waiting
