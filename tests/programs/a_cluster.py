# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, for as long as standard input is open.

Prints what there is to connect to as one line of JSON; then "kill" on standard input ends the
second node at once, "add" starts another one, and either is answered with a line.
"""

import json
import sys

from ray.cluster_utils import Cluster


def main():
    head = {
        "num_cpus": 1,
        "include_dashboard": True,
        "include_log_monitor": True,
        # Any that are free. Ray's defaults are the same for every cluster of a machine, and an
        # agent that cannot have its port takes no jobs.
        "dashboard_port": None,
        "dashboard_agent_listen_port": 0,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        second = cluster.add_node(num_cpus=1)
        found = {"gcs": cluster.address, "dashboard": f"http://{cluster.webui_url}"}
        print(json.dumps(found), flush=True)
        for line in sys.stdin:
            if line.strip() == "kill":
                cluster.remove_node(second, allow_graceful=False)
            else:
                second = cluster.add_node(num_cpus=1)
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
