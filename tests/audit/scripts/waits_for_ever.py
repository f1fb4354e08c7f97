# SPDX-License-Identifier: Apache-2.0
"""Rank 0 waits for rank 1, which does something else."""

import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def say_when_it_waits(thread):
    names = ()
    while "all_reduce" not in names:
        frame = sys._current_frames()[thread]
        names = [each.f_code.co_name for each, _ in traceback.walk_stack(frame)]
    Path(sys.argv[1]).write_text("waiting")


dist.init_process_group("gloo")
if len(sys.argv) > 2 and dist.get_rank() == 1:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
if dist.get_rank() == 0:
    waiting = threading.get_ident()
    threading.Thread(target=say_when_it_waits, args=(waiting,), daemon=True).start()
    dist.all_reduce(torch.ones(1))
else:
    threading.Event().wait()
