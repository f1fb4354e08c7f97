# SPDX-License-Identifier: Apache-2.0
"""Four workers in two groups with relays, three of them on a node that dies in the middle of a run.

Rank 1 has its relay, rank 0, on the other node; rank 3 dies together with its relay, rank 2. Run as
a program, as `two_nodes.py`.
"""

import json
import logging
import os
import threading
from pathlib import Path

from ray.cluster_utils import Cluster
from tests.ray.surviving import GLOBAL_BATCH, Classifier, run, trainer_of
from two_nodes import WaitsForItsEnd, lose

import ray
from lockstep.keys import BATCH_SIZE

ARGUMENTS = {"num_workers": 4, "num_shards": 4, "reproducible": True}


def relayed(trainer):
    workers = trainer._workers._engine.workers
    workers.ranks_per_relay = 2
    return [member.node for member in workers.members]


def main():
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    second = cluster.add_node(num_cpus=3)
    try:
        ray.init(address=cluster.address, logging_level=logging.ERROR)
        with trainer_of(Classifier, **ARGUMENTS) as trainer:
            expected = run(trainer)[1]
        here = ray.get_runtime_context().get_node_id()
        reached = Path(os.environ["RAY_TMPDIR"], "reached")
        config = {BATCH_SIZE: GLOBAL_BATCH, "staying": here, "reached": str(reached)}
        arguments = {**ARGUMENTS, "config": config, "scheduler_step_freq": "batch"}
        with trainer_of(WaitsForItsEnd, **arguments) as trainer:
            nodes = relayed(trainer)
            loss = threading.Thread(target=lose, args=(second, cluster, reached))
            loss.start()
            found = run(trainer)[1]
            loss.join()
            (recovery,) = trainer.status()["recoveries"]
        print(
            json.dumps(
                {
                    "here": [node == here for node in nodes],
                    "same": expected == found,
                    "lost": sorted(each[-len("rank 0") :] for each in recovery["lost"]),
                    "workers": recovery["workers"],
                }
            )
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
