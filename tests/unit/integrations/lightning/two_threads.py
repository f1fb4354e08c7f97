# SPDX-License-Identifier: Apache-2.0
"""Two ranks as threads."""

from lockstep.operator import Options
from lockstep.worker import WorkerSpec


def on_two_threads(operator_cls, body, **options):
    """``body(worker)`` on each of two ranks, which are threads over real gloo."""
    # Ray's workers import a test's module with all that it imports, and have no such path.
    from ranks.table import run_workers

    spec = WorkerSpec(operator_cls, {}, 2, num_shards=2, seed=0, options=Options(**options))
    return run_workers(spec, body)
