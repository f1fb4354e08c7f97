# SPDX-License-Identifier: Apache-2.0
"""The environment of a program that gets none of Ray's settings from the test run."""

import os


def without_ray_variables() -> dict[str, str]:
    """The environment of this process, without the test run's cluster and token.

    Ray's workers keep the priority that tests/conftest.py gives them: with Ray's own (nice 15) a
    test of 100 s took 460 beside another one.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"RAY_worker_niceness": "0"}
