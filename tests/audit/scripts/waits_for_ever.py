# SPDX-License-Identifier: Apache-2.0
"""Rank 0 waits for rank 1, which does something else."""

import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text("waiting")
    dist.all_reduce(torch.ones(1))
else:
    threading.Event().wait()
