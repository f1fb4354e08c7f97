# SPDX-License-Identifier: Apache-2.0
"""A cluster of two nodes, of which one dies in the middle of a run, and another one joins.

Run as a program: a process has one connection to Ray, and the tests have theirs.
"""

import json
import logging
import threading
import time

from ray.cluster_utils import Cluster
from tests.ray.surviving import Classifier, digest, trainer_of

import ray
from listening import listens

EVERYWHERE = {"::", "0.0.0.0"}
ARGUMENTS = {"num_workers": 2, "num_shards": 4, "reproducible": True}


def train(trainer, on_second=lambda: None):
    results = []
    for number in range(4):
        if number == 1:
            on_second()
        results.append(trainer.train()["num_samples"])
    return results, digest(trainer)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def main():
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    second = cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, logging_level=logging.ERROR)
        with trainer_of(Classifier, **ARGUMENTS) as trainer:
            expected = train(trainer)
        with trainer_of(Classifier, **ARGUMENTS) as trainer:
            members = trainer._engine._engine.members
            nodes = {member.node for member in members}
            # Ray's own servers listen everywhere.
            gloo = {address for m in members for address, _ in listens(m.pid)} - EVERYWHERE
            is_within_reach = gloo == {ray.util.get_node_ip_address()}
            lost = threading.Timer(0.05, lambda: cluster.remove_node(second, allow_graceful=False))
            found = train(trainer, on_second=lost.start)
            lost.join()
            alone = trainer.status()
            cluster.add_node(num_cpus=1)
            # A worker that is ready takes the free place at the next call, as this one is.
            until(lambda: trainer.status()["workers"] == 2)
            trainer.train(num_steps=1)
            together = trainer.status()
        print(
            json.dumps(
                {
                    "nodes": len(nodes),
                    "within reach": is_within_reach,
                    "same": expected == found,
                    "alone": alone["workers"],
                    "recoveries": len(alone["recoveries"]),
                    "together": together["workers"],
                }
            )
        )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
