# SPDX-License-Identifier: Apache-2.0
"""Train, lose a worker, and read what Ray serves of it to Prometheus.

Run as a program: how often Ray collects metrics is decided when it starts.
"""

import json
import re
import time
import urllib.request

from tests.ray.surviving import Classifier, trainer_of

import ray
from lockstep.integrations.loggers import RayMetricsLogger
from lockstep.testing import Strike

SERIES = re.compile(r"^ray_(lockstep_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


def served():
    """Name and own labels of each series of ours, with its value."""
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=10) as page:
        text = page.read().decode()
    found = {}
    for name, labels, value in SERIES.findall(text):
        own = dict(LABEL.findall(labels))
        key = [name, own["run"], own["phase"], own.get("metric", "")]
        found["|".join(key).rstrip("|")] = float(value)
    return found


def served_when(condition):
    deadline = time.monotonic() + 60
    while not condition(found := served()):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def is_complete(found, loss):
    """Whether the last loss and the count of recoveries are there: Ray collects each by itself."""
    is_counted = "lockstep_recoveries_total|a run|train" in found
    return is_counted and found.get("lockstep_loss|a run|validation") == loss


def main():
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        _system_config={"metrics_report_interval_ms": 200},
    )
    strike = Strike("kill", rank=1, step=9, phase="backward")
    with trainer_of(Classifier, [strike], callbacks=[RayMetricsLogger("a run")]) as trainer:
        trainer.train()
        trained = trainer.train()
        validated = trainer.validate()
        while_it_runs = served_when(lambda found: is_complete(found, validated["val_loss"]))
    afterwards = served_when(lambda found: found.get("lockstep_workers|a run|train") == 0)
    print(json.dumps([trained, validated, while_it_runs, afterwards]))


if __name__ == "__main__":
    main()
