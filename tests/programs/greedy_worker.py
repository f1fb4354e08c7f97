# SPDX-License-Identifier: Apache-2.0
"""A worker takes more memory than Ray's monitor allows, once. Prints what came of the run."""

import json
import sys
import threading
from pathlib import Path

import numpy as np
from tests.ray.surviving import GLOBAL_BATCH, STEPS_IN_EPOCH, Classifier, digest, trainer_of

import ray
from lockstep.keys import BATCH_SIZE

ALLOWED, TAKEN = 3 << 30, 5 << 30


class Greedy(Classifier):
    """Rank 1 takes the memory in the sixth step, unless the file says that one has taken it."""

    def compute_loss(self, batch, batch_info):
        taken = Path(self.config["taken"])
        if self.world_rank == 1 and self.global_step == 5 and not taken.exists():
            taken.touch()
            held = np.ones(TAKEN, np.uint8)
            # Ray's monitor looks several times a second, and ends this process meanwhile.
            threading.Event().wait(60)
            raise AssertionError(f"nobody has ended a process that holds {held.nbytes} bytes")
        return super().compute_loss(batch, batch_info)


def allowed_share():
    """What is in use now and `ALLOWED` bytes more, as a share of the memory of this machine."""
    kilobytes = {
        line.split(":")[0]: int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
    }
    total = kilobytes["MemTotal"]
    return (total - kilobytes["MemAvailable"] + ALLOWED // 1024) / total


def main(folder):
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        logging_level="ERROR",
        _system_config={
            "memory_usage_threshold": allowed_share(),
            "memory_monitor_refresh_ms": 1000,  # a process needs a moment to give it back
        },
    )
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    undisturbed.touch()
    for taken in (undisturbed, disturbed):
        config = {BATCH_SIZE: GLOBAL_BATCH, "taken": str(taken)}
        # Ray may end others as well, and fewer go on: reproducible, to the same bits.
        with trainer_of(Greedy, config=config, spare_workers=2, reproducible=True) as trainer:
            result = trainer.train()
            assert result["batch_count"] == STEPS_IN_EPOCH
            status = trainer.status()
            told = {
                "bits": digest(trainer),
                "lost": [lost for each in status["recoveries"] for lost in each["lost"]],
                "why": [each["why"] for each in status["recoveries"]],
            }
        print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
