# SPDX-License-Identifier: Apache-2.0
"""Where a random program runs: in one process by plain autograd, or as one of N ranks.

Torch and lockstep are all that this file needs: a program that failed is written out with it.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import PeerLostError
from lockstep.group import Group
from lockstep.sync import DataParallelModel, GradientSync, ParameterServer, ParameterServerSync
from lockstep.sync.parameter_server.server_connection import connect_to_server


class World:
    """What a program asks of the place where it runs; by itself, one process with all rows.

    Args:
        seed: of the data.
        splits: rows of each rank, for one batch after the other, round and round.
        way: see `Spec`.
        sync: what `attach` attaches.

    Attributes:
        rank: None in one process.
        seen: for each optimizer, the gradients that its steps used and the weights after them.
        also: tensors that the program showed.
    """

    rank: int | None = None

    def __init__(self, seed, splits, way, sync="", absent="pending", checks=False) -> None:
        self.seed, self.splits, self.way, self.absent = seed, splits, way, absent
        self.kind, self.checks = sync, checks
        self.sync: Any = OneProcess(self)
        self.seen: list[list[Any]] = []
        self.also: list[torch.Tensor] = []
        self.modules: list[torch.nn.Module] = []
        self._next = 0
        self._weight = 0.0

    # ------------------------------------------------------------------ rows

    def batch(self):
        """The next batch: features, targets, and what each row counts."""
        found, borrowed = self.look(), False
        rows = len(found[0])
        if self.rank is not None and not rows and self.absent == "borrowed":
            x, y, w = (column[:1] for column in self._columns())
            # A row that takes the way of a real one; nothing of it may be seen anywhere.
            found, borrowed = [x, y * torch.nan, w], True
        if self.kind == "fsdp" and self.rank is not None:
            self.sync.begin_step(self._next)  # weights are gathered, also for one without rows
        self._next += 1
        total = found[2].sum().item() if self.way == "tokens" and not borrowed else float(rows)
        self._weight = 0.0 if borrowed else total
        if self.way == "delivered" or self.absent == "borrowed":
            delivers = self.way == "delivered" or borrowed
            self.sync.set_delivered_weight(self._weight if delivers else None)
        return found

    def look(self):
        """The same, without taking it."""
        columns = self._columns()
        if self.rank is None:
            return columns
        split = self.splits[self._next % len(self.splits)]
        start = sum(split[: self.rank])
        return [column[start : start + split[self.rank]] for column in columns]

    def _columns(self):
        rows = sum(self.splits[self._next % len(self.splits)])
        source = torch.Generator().manual_seed(self.seed * 1009 + self._next)
        made = {"generator": source, "dtype": torch.float64}
        x, y = torch.randn(rows, 4, **made), torch.randn(rows, 3, **made)
        # Half of the rows count for nothing: now and then these are all that a rank has.
        w = torch.randint(-2, 4, (rows,), generator=source).clamp(min=0).double()
        w[0] += 1  # not all rows of a batch count for nothing
        return [x, y, w]

    @property
    def weight(self):
        """What the last batch counts for; zero if its rows are borrowed."""
        return self._weight

    def average(self, tensor):
        """The user's own mean over all rows of a mean over this rank's; or their sum."""
        return tensor

    # ------------------------------------------------------------------ gradients

    def attach(self, modules, optimizers):
        """Synchronise; the modules to use from now on."""
        self.modules = list(modules)
        self.parameters = [p for module in modules for p in module.parameters()]
        if self.kind == "data_parallel":
            devices = [torch.device("cpu")] * len(self.splits[0])
            modules = [DataParallelModel(module, devices) for module in modules]
        for optimizer in optimizers:
            self.watch(optimizer)
        return modules

    def watch(self, optimizer):
        """Note what its steps use."""
        steps: list[Any] = []
        self.seen.append(steps)
        optimizer.noted = []

        def before(optimizer, args, kwargs) -> None:
            if not (args[1:] if args and args[0] is optimizer else args):
                optimizer.noted = []
                self.note(optimizer)

        def after(optimizer, args, kwargs) -> None:
            steps.append((optimizer.noted, [_copy(p) for p in _held(optimizer)]))
            optimizer.noted = []

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer

    def note(self, optimizer) -> None:
        """Remember the gradients that it would use now."""
        optimizer.noted.append([_copy(p.grad) for p in _held(optimizer)])

    def see(self, tensor) -> None:
        """Remember a tensor, to be compared with one process's."""
        self.also.append(torch.zeros(0) if tensor is None else tensor.detach().clone().to_dense())

    def give_up_window(self) -> None:
        """Zero the gradients of a window whose last backward has not come."""
        for p in self.parameters:
            p.grad = None
        if isinstance(self.sync, OneProcess):
            self.sync.forget_window()

    def weights(self):
        return [_copy(p) for module in self.modules for p in module.parameters()]

    def end(self) -> None:
        """Let go of everything."""


class OneProcess:
    """What `sync` is in one process: plain autograd, a window as one sum of its losses."""

    def __init__(self, world: World) -> None:
        self._world, self._is_paused, self._window = world, False, []

    def backward(self, loss, weight=None, **options) -> None:
        if not self._is_paused and not self._window:
            if self._world.checks and not options:
                self._check(loss)
            else:
                loss.backward(**options)
            return
        self._window.append((loss, weight))
        if not self._is_paused:
            self.reduce_pending()

    def reduce_pending(self) -> None:
        window, self._window = self._window, []
        if not window:
            return
        total = sum(weight or 0.0 for _, weight in window)
        parts = [loss if weight is None else loss * (weight / total) for loss, weight in window]
        sum(parts[1:], start=parts[0]).backward()

    def forget_window(self) -> None:
        self._window = []

    @contextmanager
    def no_sync(self):
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def set_delivered_weight(self, weight) -> None: ...

    def broadcast_buffers(self) -> None: ...

    def _check(self, loss) -> None:
        """A backward beside ``torch.autograd.grad``, which goes another way through torch."""
        live = [p for p in self._world.parameters if p.requires_grad]
        before = [None if p.grad is None else p.grad.clone() for p in live]
        found = torch.autograd.grad(loss, live, retain_graph=True, allow_unused=True)
        loss.backward()
        for p, old, new in zip(live, before, found, strict=True):
            if new is None:
                continue
            new = (new if old is None else old + new).to_dense()
            if (p.grad.to_dense() - new).abs().sum() > 1e-9 * (1 + new.abs().sum()):
                raise Discarded("backward and autograd.grad differ in one process")


class Discarded(Exception):
    """The program says nothing: it fails in one process."""


class RankWorld(World):
    """One of N ranks."""

    def __init__(self, group: Group, address, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.group, self.rank, self._address = group, group.rank, address

    def attach(self, modules, optimizers):
        super().attach(modules, optimizers)
        self.sync = self._attached(modules, optimizers)
        return self.sync.models if self.kind == "ddp" else modules

    def _attached(self, modules, optimizers):
        small = {"bucket_cap_mb": 1e-4 if self.seed % 2 else 25, "averages": self.way != "sums"}
        if self.kind == "ddp":
            from lockstep.sync.ddp_sync import DDPSync

            chosen = {"find_unused_parameters": True} if self.seed % 3 else {}
            return DDPSync(modules, self.group, ddp_args=chosen, **small)
        if self.kind == "fsdp":
            from lockstep.sync.fsdp import FSDPSync

            return FSDPSync(modules, self.group, optimizers, **small)
        if self.kind == "parameter_server":
            return ParameterServerSync(modules, optimizers, self.group, self._address, **small)
        return GradientSync(modules, self.group, **small)

    def average(self, tensor):
        if self.way == "sums":
            flat = tensor.detach().clone()
            self.group.all_reduce(flat).wait()
            return flat
        flat = torch.stack([tensor.detach() * self.weight, torch.full_like(tensor, self.weight)])
        if not self.weight:
            flat = torch.zeros_like(flat)
        self.group.all_reduce(flat).wait()
        return flat[0] / flat[1]

    def end(self) -> None:
        if isinstance(self.sync, OneProcess):
            return
        self.sync.detach()


def _held(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copy(tensor):
    if tensor is None:
        return None
    tensor = tensor.detach()
    local = getattr(tensor, "to_local", None)
    if local is not None:
        return ("shard", local().clone())
    return tensor.to_dense().clone() if tensor.is_sparse else tensor.clone()


# ---------------------------------------------------------------------- ranks as threads


def groups(size: int, timeout_s: float):
    """A group for every rank."""
    store, made = dist.HashStore(), [None] * size

    def join(rank: int) -> None:
        made[rank] = Group(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s)))

    side_by_side(join, size, timeout_s)
    return made


def side_by_side(one, size: int, patience_s: float) -> list[Any]:
    """``one(rank)`` on a thread each. What it returned or raised; None from one that is stuck."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = (one(rank),)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [result[0] if isinstance(result, tuple) else result for result in results]


@contextmanager
def server_for(sync: str, size: int):
    """A parameter server for `size` ranks, on a thread, if `sync` wants one."""
    if sync != "parameter_server" or size == 1:
        with nullcontext() as nobody:
            yield nobody
        return
    listening = ParameterServer("127.0.0.1", size, b"a secret" * 4, 20.0)
    thread = threading.Thread(target=listening.serve, daemon=True)
    thread.start()
    try:
        yield listening.address
    finally:
        for rank in range(size):
            if thread.is_alive():
                with suppress(PeerLostError):
                    connect_to_server(listening.address, rank).close()
        thread.join(5.0)
