# SPDX-License-Identifier: Apache-2.0
"""A cluster of two nodes, of which one dies in the middle of a run, and another one joins.

Run as a program: a process has one connection to Ray, and the tests have theirs.
"""

import json
import logging
import os
import threading
import time
from pathlib import Path

from ray.cluster_utils import Cluster
from tests.ray.surviving import GLOBAL_BATCH, STEPS_IN_EPOCH, Classifier, digest, trainer_of

import ray
from listening import listens
from lockstep.keys import BATCH_SIZE

EVERYWHERE = {"::", "0.0.0.0"}
ARGUMENTS = {"num_workers": 2, "num_shards": 4, "reproducible": True}


class WaitsForItsEnd(Classifier):
    """Of the second epoch's first steps, one never ends on the node that will die in it."""

    def compute_loss(self, batch, batch_info):
        is_staying = ray.get_runtime_context().get_node_id() == self.config["staying"]
        if self.global_step == STEPS_IN_EPOCH + 2 and not is_staying:
            Path(self.config["reached"]).touch()
            threading.Event().wait()
        return super().compute_loss(batch, batch_info)


def train(trainer):
    return [trainer.train()["num_samples"] for _ in range(4)], digest(trainer)


def lose(node, cluster, reached):
    until(reached.exists)
    cluster.remove_node(node, allow_graceful=False)


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
        reached = Path(os.environ["RAY_TMPDIR"], "reached")
        config = {
            BATCH_SIZE: GLOBAL_BATCH,
            "staying": ray.get_runtime_context().get_node_id(),
            "reached": str(reached),
        }
        arguments = {**ARGUMENTS, "config": config, "scheduler_step_freq": "batch"}
        with trainer_of(WaitsForItsEnd, **arguments) as trainer:
            members = trainer._workers._engine.workers.members
            nodes = {member.node for member in members}
            # Ray's own servers listen everywhere.
            gloo = {address for m in members for address, _ in listens(m.pid)} - EVERYWHERE
            is_within_reach = gloo == {ray.util.get_node_ip_address()}
            loss = threading.Thread(target=lose, args=(second, cluster, reached))
            loss.start()
            found = train(trainer)
            loss.join()
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
