# SPDX-License-Identifier: Apache-2.0
"""Starts two ranks, of which rank 0 waits for rank 1, which does something else."""

import multiprocessing
import sys
import threading

import torch
import torch.distributed as dist


def train(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if rank:
        threading.Event().wait()
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train, args=(rank, sys.argv[1])) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
