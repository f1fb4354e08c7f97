# SPDX-License-Identifier: Apache-2.0
"""Rank 1 waits for rank 0, whose other threads hardly get a turn while it computes."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    sys.setswitchinterval(1.0)
    begun = time.process_time()
    while time.process_time() < begun + 8: pass  # fmt: skip  # noqa: E701
    sys.setswitchinterval(0.005)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
