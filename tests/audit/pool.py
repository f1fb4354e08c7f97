# SPDX-License-Identifier: Apache-2.0
"""Two processes that run one program after the other, each as two ranks of a fresh group.

Importing torch costs more than most programs here; so the processes are made once. A program is
run as `lockstep audit` runs it: as ``__main__``, under the probe, from its own file.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from lockstep.audit.finding import Finding, Place
from lockstep.audit.judgement import judge
from lockstep.audit.ledger import Ledger

RANKS = 2
ANSWERS_WITHIN_S = 50.0
PROGRAMS_EACH = 40
"""Programs that a process runs. The audit lets no process group go before its process ends (see
``Probe``), and the threads of a hundred idle groups keep a processor busy."""


def _rank(rank: int, pipe: Connection) -> None:
    import torch
    from torch.optim import optimizer

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    main = sys.modules["__main__"]
    while True:
        job = pipe.recv()
        if job is None:
            return
        script, arguments, mode, port = job
        os.environ["MASTER_PORT"] = str(port)
        torch.manual_seed(0)
        np.random.seed(int(os.environ["RANK"]))  # the same again when a program is recorded again
        random.seed(int(os.environ["RANK"]))
        try:
            ledger = _watched(script, arguments, mode)
            left = len(optimizer._global_optimizer_pre_hooks)
            answer: Any = (ledger.to_bytes(), left)
        except BaseException:
            answer = traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        # Modules of this program must not be found by the next one's audit.
        # An autograd Function lives for ever, and with it what its program's globals hold.
        vars(sys.modules["__main__"]).clear()
        sys.modules["__main__"] = main
        gc.collect()
        pipe.send(answer)


def _watched(script: str, arguments: list[str], mode: str) -> Ledger:
    """What this rank saw of a script."""
    from lockstep.audit.probe.hooking import hook_in
    from lockstep.audit.probe.probe import Probe
    from lockstep.audit.script import describe_failure, run_script
    from lockstep.audit.session import finish

    probe = Probe(mode=mode, keeps_groups=True)
    hook_in(probe)

    def note_failure(error: BaseException, where: list[Place]) -> None:
        probe.ledger.failure = describe_failure(error)
        probe.ledger.stack = where

    code = run_script(script, arguments, note_failure, lambda error: None)
    ledger = finish(probe)
    ledger.exit_code = code
    return ledger


class Pool:
    """Two living ranks."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._programs = 0
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, theirs), daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ledgers(self, program: Path, *arguments: str, mode: str = "full") -> list[Ledger]:
        """Run `program` on both ranks, and give back what each saw."""
        if self._programs == PROGRAMS_EACH:
            self.close()
            self._start()
        self._programs += 1
        # A store of its own for every program: no key of the last one is left.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in self._pipes:
            pipe.send((str(program), list(arguments), mode, store.port))
        found = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(ANSWERS_WITHIN_S), f"rank {rank} hangs in {program.name}"
            answer = pipe.recv()
            assert not isinstance(answer, str), answer
            assert answer[1] == 0, f"{answer[1]} optimizer hooks are left"
            found.append(Ledger.from_bytes(answer[0]))
        return found

    def findings(self, program: Path, *arguments: str, mode: str = "full") -> list[Finding]:
        """Run `program` and judge it."""
        return self.judge(self.ledgers(program, *arguments, mode=mode))

    def judge(self, ledgers: list[Ledger]) -> list[Finding]:
        """What the rules say of `ledgers`."""
        return judge(ledgers)

    def close(self) -> None:
        """End both processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
