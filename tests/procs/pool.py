# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes, started once: cells of the table that need a default group."""

from __future__ import annotations

import multiprocessing
import traceback
from typing import Any

import torch
import torch.distributed as dist

from lockstep.worker import Rendezvous, Worker
from ranks.table import server_for, spec_of, train

ANSWER_WITHIN_S = 40


def serve(rank: int, port: int, pipe: Any) -> None:
    """Run cell after cell, each in a group of its own."""
    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        try:
            pipe.send(_run(rank, port, *job))
        except BaseException as error:
            pipe.send(RuntimeError(f"rank {rank}: {''.join(traceback.format_exception(error))}"))


def _run(rank: int, port: int, generation: int, cell: Any, server_address: Any) -> Any:
    torch.compiler.reset()
    spec = spec_of(*cell)
    rendezvous = Rendezvous(
        "127.0.0.1",
        port,
        generation,
        "gloo",
        one_node=True,
        timeout_s=30,
        server_address=server_address,
    )
    worker = Worker(spec, rank, rank)
    try:
        worker.start(rendezvous if spec.num_workers > 1 else None)
        return train(worker)
    finally:
        worker.stop()


class Pool:
    """`size` processes, forked from one that has imported torch."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lockstep.worker", "torch._dynamo"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._generation = 0
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self._store.port, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, sync: str, name: str, split: str, num_workers: int, use_gpu: bool = False
    ) -> list[Any]:
        """As `ranks.table.on_threads`.

        Args:
            use_gpu: all ranks share the first CUDA device, over gloo: NCCL wants a device for each.
                Threads would share one that runs their backwards, and wait for each other there.
        """
        self._generation += 1
        cell = (sync, name, split, num_workers, use_gpu)
        taking_part = self._pipes[:num_workers]
        with server_for(sync, num_workers) as address:
            for pipe in taking_part:
                pipe.send((self._generation, cell, address))
            for rank, pipe in enumerate(taking_part):
                assert pipe.poll(ANSWER_WITHIN_S), f"rank {rank} hangs"
            return [pipe.recv() for pipe in taking_part]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(5)
            process.kill()
            process.join()
            process.close()
            pipe.close()
