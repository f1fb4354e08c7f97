# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes, for weights in shards: those want torch's default process group."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import LockstepError
from lockstep.group import Group
from soak.judging import Trace
from soak.spec import Spec
from soak.worlds import RankWorld


def serve(rank: int, port: int, pipe: Any, patience_s: float) -> None:
    """Run one program after the other, each in a default group of its own."""
    from soak import running

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meeting = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    pipe.send("ready")
    while True:
        try:
            generation, given, source = pipe.recv()
        except EOFError:
            return
        spec = Spec.from_json(given)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(generation), meeting),
            rank=rank,
            world_size=spec.workers,
            timeout=timedelta(seconds=patience_s),
        )
        group = Group(dist.group.WORLD)
        world = RankWorld(group, None, spec.seed, spec.splits, spec.way, "fsdp", spec.absent)
        trace = running.traced(world, *running.prepared(spec, source))
        group.close()
        dist.destroy_process_group()
        if trace.error is not None and not isinstance(trace.error, LockstepError):
            trace.error = RuntimeError(f"{type(trace.error).__name__}: {trace.error}")
        if trace.error is not None:
            trace.error.__traceback__ = trace.error.__cause__ = None
        pipe.send(trace)


class Shards:
    """`size` processes, each one rank of every program."""

    def __init__(self, size: int, patience_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._patience_s, self._generation = patience_s, 0
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, self._store.port, theirs, patience_s)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()  # the time that a start takes is not a program's

    def run(self, spec: Spec, source: str) -> list[Trace]:
        """A trace of each rank; stuck ones mean that these processes are of no use any more."""
        self._generation += 1
        pipes = self._pipes[: spec.workers]
        for pipe in pipes:
            pipe.send((self._generation, spec.to_json(), source))
        deadline = time.monotonic() + 3 * self._patience_s
        return [_answer(pipe, deadline) for pipe in pipes]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def _answer(pipe: Any, deadline: float) -> Trace:
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            return pipe.recv()
    except (EOFError, OSError):
        pass
    return Trace([], [], [], is_stuck=True)
