# SPDX-License-Identifier: Apache-2.0
"""Rank 1 raises; rank 0 waits for it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise KeyError("only rank 1")
dist.all_reduce(torch.ones(1))
