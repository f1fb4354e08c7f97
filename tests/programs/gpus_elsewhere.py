# SPDX-License-Identifier: Apache-2.0
"""A driver on a machine without GPUs, in a cluster of which another machine has some.

Run as a program: a process has one connection to Ray, and the tests have theirs. Ray takes a node's
word for its GPUs: who is sent for one that is not there says so.
"""

import json
import logging

from ray.cluster_utils import Cluster
from tests.ray.surviving import Classifier, trainer_of

import ray
from lockstep.errors import NotAvailableError


def asks_for_gpus(**arguments):
    try:
        with trainer_of(Classifier, **arguments) as trainer:
            return any(trainer.apply_all_operators(lambda operator: operator.use_gpu))
    except NotAvailableError as error:
        return "torch finds none" in str(error)


def main():
    head = {"num_cpus": 3, "num_gpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, logging_level=logging.ERROR)
        told = {"nowhere": asks_for_gpus()}
        cluster.add_node(num_cpus=2, num_gpus=2)
        told["elsewhere"] = asks_for_gpus()
        told["not for the spare"] = asks_for_gpus(spare_workers=1)
        print(json.dumps(told))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
