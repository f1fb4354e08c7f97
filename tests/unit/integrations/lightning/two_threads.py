# SPDX-License-Identifier: Apache-2.0
"""Two ranks as threads. Apart from the modules, which Ray's workers import too."""

import torch

from lockstep.errors import PeerLostError
from lockstep.operator import Options
from lockstep.worker import Worker, WorkerSpec
from ranks.table import as_threads


def on_two_threads(operator_cls, body, **options):
    """``body(worker)`` on each of two ranks, which are threads over real gloo."""
    spec = WorkerSpec(operator_cls, {}, 2, num_shards=2, seed=0, options=Options(**options))

    def one_rank(rank, make_group):
        worker = Worker(spec, rank, rank)
        worker._group = make_group()
        try:
            worker._build_operator(torch.device("cpu"))
            return body(worker)
        finally:
            worker.stop()

    results = as_threads(2, one_rank)
    failures = [result for result in results if isinstance(result, BaseException)]
    # A rank that lost its peer says less than the peer.
    for failure in sorted(failures, key=lambda one: isinstance(one, PeerLostError)):
        raise failure
    return results
