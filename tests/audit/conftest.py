# SPDX-License-Identifier: Apache-2.0
"""One pair of ranks for all programs."""

import pytest

from audit.pool import Pool


@pytest.fixture(scope="session")
def pool():
    made = Pool()
    yield made
    made.close()
