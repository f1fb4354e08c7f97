# SPDX-License-Identifier: Apache-2.0
"""A driver on a machine without CUDA, and GPUs that Ray has on its node or on another one.

Run as a program: a process has one connection to Ray, and the tests have theirs. Ray takes a node's
word for its GPUs: who is sent for one that is not there says so.
"""

import json
import logging

from ray.cluster_utils import Cluster
from tests.ray.surviving import Classifier, trainer_of

import ray
from lockstep.errors import NotAvailableError


def asks_for_gpus(num_workers):
    arguments = {"num_workers": num_workers, "scheduler_step_freq": "batch"}
    try:
        with trainer_of(Classifier, **arguments) as trainer:
            return trainer.apply_all_operators(lambda operator: operator.use_gpu)[0]
    except NotAvailableError as error:
        return "torch finds none" in str(error)


def main():
    head = {"num_cpus": 3, "num_gpus": 3, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, logging_level=logging.ERROR)
        here = asks_for_gpus(2)
        cluster.add_node(num_cpus=2, num_gpus=2)
        print(json.dumps({"here": here, "too few": asks_for_gpus(3), "other": asks_for_gpus(2)}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
