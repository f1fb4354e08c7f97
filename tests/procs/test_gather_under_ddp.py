# SPDX-License-Identifier: Apache-2.0
"""The functions need nothing of lockstep around them: under torch's own DDP they are exact too.

Both processes run all losses, and the first compares with one process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

PROGRAM = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import assert_same, cut, gradients
from lockstep.group import Group
from ranks.contrastive import LEFT, LOSSES, RIGHT, SPLITS, TOTAL, towers

dist.init_process_group("gloo")
rank = dist.get_rank()


class WithLoss(torch.nn.Module):
    # DDP looks for unused parameters in what its module returns: let that be the loss.
    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, left, right):
        return self.loss.on_ranks(self.model, *self.model(left, right), Group(dist.group.WORLD))


for name, loss in LOSSES.items():
    for split in ("2 even", "2 uneven"):
        sizes = SPLITS[split]
        if split == "2 uneven" and not loss.any_weights:
            continue
        true = towers()
        loss.alone(true, *true(LEFT, RIGHT), sizes).backward()
        model = towers()
        wrapped = DistributedDataParallel(WithLoss(model, loss), find_unused_parameters=True)
        mine = cut(TOTAL, sizes)[rank]
        wrapped(LEFT[mine], RIGHT[mine]).backward()
        found = gradients(model)
        assert_same(found, gradients(true))
        print("exact:", name, split, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_exact_under_ddp(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(program)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("exact:") >= 2 * 15
