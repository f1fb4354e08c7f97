# SPDX-License-Identifier: Apache-2.0
"""One real Ray for the whole test run: starting it costs seconds, a test does not."""

import logging

import pytest

import ray


@pytest.fixture(scope="session", autouse=True)
def _cluster():
    ray.init(
        num_cpus=4, resources={"lane": 2}, logging_level=logging.ERROR, include_dashboard=False
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _gives_everything_back():
    """No test leaves an actor or a placement group behind."""
    yield
    free = ray.available_resources().get("CPU", 0)
    assert free == 4 or _eventually_free(), f"{4 - free:g} CPUs are still held"


def _eventually_free() -> bool:
    # The scheduler hears of the end of a process from the node, some milliseconds later.
    import time

    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if ray.available_resources().get("CPU", 0) == 4:
            return True
        time.sleep(0.05)
    return False
