# SPDX-License-Identifier: Apache-2.0
"""Rank 1 waits for rank 0, which computes for some seconds at one line."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    begun = time.process_time()
    while time.process_time() < begun + 3: pass  # fmt: skip  # noqa: E701
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
