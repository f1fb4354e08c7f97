# SPDX-License-Identifier: Apache-2.0
"""Rank 1 waits for rank 0, which waits for a program of its own that computes for some seconds."""

import subprocess

import torch
import torch.distributed as dist

COUNTS = "i=0; while [ $i -lt 4000000 ]; do i=$((i + 1)); done"

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    subprocess.run(["sh", "-c", COUNTS], check=True)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
