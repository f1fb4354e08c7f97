# SPDX-License-Identifier: Apache-2.0
"""The processes that the tables share: to start them takes longer than a table's quick cells."""

import pytest
from tests.procs.pool import Pool


@pytest.fixture(scope="session")
def pool():
    processes = Pool(4)
    yield processes
    processes.close()
