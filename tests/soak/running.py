# SPDX-License-Identifier: Apache-2.0
"""One program, run in one process and on ranks that are threads."""

from __future__ import annotations

import copy
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lockstep.group import Group
from soak import operators, text
from soak.judging import NUDGE, Outcome, Trace, judged, spread_of
from soak.refusals import is_explained
from soak.sharded import Shards
from soak.spec import Spec
from soak.worlds import RankWorld, World, groups, server_for, side_by_side

NAMES = {
    "torch": torch, "nn": nn, "F": F, "copy": copy, "threading": threading,
    "ThreadPoolExecutor": ThreadPoolExecutor, "checkpoint": checkpoint,
    "parametrizations": parametrizations,
}  # fmt: skip

PATIENCE_S = float(os.environ.get("SOAK_PATIENCE_S", "8"))
"""For a collective; and for what a rank leaves waiting when it has ended."""

GRACE_S = 0.5
"""Between the end of one rank and that of the last, before the first ones hang up."""

CHECKED = 4
"""Of so many programs one has its oracle checked by ``torch.autograd.grad``."""


class Runner:
    """Runs programs; keeps process groups that nothing has happened to.

    Args:
        patience_s: for a collective; three times as much for a whole program.
        rank_world: what a rank's program runs in.

    Attributes:
        is_tainted: a thread is stuck: the process should end.
    """

    def __init__(
        self, patience_s: float = PATIENCE_S, rank_world: type[RankWorld] = RankWorld
    ) -> None:
        self._patience_s, self._rank_world = patience_s, rank_world
        self._groups: dict[int, list[Group]] = {}
        self._shards: Shards | None = None
        self.is_tainted = False

    def run(self, spec: Spec) -> Outcome:
        """Both, and what comes of it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = source_of(spec)
            if spec.model == "compiled":
                torch.compiler.reset()  # it remembers so many models of one kind, and no more
            try:
                true = _true(spec, source)
            # Whatever it is: a program that fails in one process says nothing.
            except Exception as error:
                return Outcome("discarded", f"{type(error).__name__}: {error}".splitlines()[0])
            if not _is_finite(true):
                return Outcome("discarded", "not finite")
            if spec.sync == "fsdp" and self._shards is None:
                self._shards = Shards(4, self._patience_s)
            started = time.monotonic()
            ranks = self._ranks(spec, source)
            is_late = time.monotonic() - started > self._patience_s
            is_late &= "strikes" not in spec.options
            known = {
                "is_late": is_late,
                "by_hand": _by_hand(spec),
                "steps_ahead": _steps_ahead(spec),
            }
            found = judged(true, ranks, **known)
            if found.kind == "wrong":
                nearby = _true(spec, source, _nudge_of(spec))
                found = judged(true, ranks, **known, spread=spread_of(true, nearby))
        return concluded(spec, found)

    def _ranks(self, spec: Spec, source: str) -> list[Trace]:
        if "strikes" in spec.options:
            from soak import on_ray  # Ray takes a second to import

            return on_ray.on_ray(spec, source, NAMES)
        if "loop" in spec.options:
            found = operators.on_ranks(spec, source, NAMES, self._patience_s)
            self.is_tainted |= any(trace.is_stuck for trace in found)
            return found
        if spec.sync == "fsdp":
            return self._in_shards(spec, source)
        if spec.sync == "data_parallel":
            return [traced(World(*_arguments(spec)), *prepared(spec, source))]
        made = self._groups.pop(spec.workers, None) or groups(spec.workers, self._patience_s)
        programs = [prepared(spec, source) for _ in range(spec.workers)]
        traces: list[Trace | None] = [None] * spec.workers

        def one(rank: int) -> None:
            world = self._rank_world(made[rank], address, *_arguments(spec))
            traces[rank] = traced(world, *programs[rank])
            if traces[rank].error is not None:
                made[rank].close()

        with server_for(spec.sync, spec.workers) as address:
            watcher = threading.Thread(
                target=_hang_up, args=(made, traces, 3 * self._patience_s), daemon=True
            )
            watcher.start()
            side_by_side(one, spec.workers, 3 * self._patience_s)
            stuck = [place for place, trace in enumerate(traces) if trace is None]
        for place in stuck:
            self.is_tainted = True
            traces[place] = Trace([], [], [], is_stuck=True)
        watcher.join()
        # See `harness.side_by_side`.
        DistributedDataParallel._active_ddp_module = None
        found = [trace for trace in traces if trace is not None]
        if any(trace.error is not None or trace.is_stuck for trace in found) or not _meet(made):
            for group in made:
                group.close()
        else:
            self._groups[spec.workers] = made
        return found

    def _in_shards(self, spec: Spec, source: str) -> list[Trace]:
        assert self._shards is not None
        found = self._shards.run(spec, source)
        if any(trace.is_stuck for trace in found):
            self._shards.close()
            self._shards = None
        return found

    def close(self) -> None:
        """Let go of groups and processes."""
        if self._shards is not None:
            self._shards.close()
            self._shards = None
        for made in self._groups.values():
            for group in made:
                group.close()
        self._groups.clear()


def concluded(spec: Spec, outcome: Outcome) -> Outcome:
    """A refusal that no table explains is a failure."""
    if outcome.kind == "refused" and not is_explained(spec, outcome.what):
        return Outcome("unexplained", outcome.what, outcome.text)
    return outcome


def source_of(spec: Spec) -> str:
    """The program's text."""
    return operators.program(spec) if "loop" in spec.options else text.program(spec)


def _true(spec: Spec, source: str, nudge: float = 0.0) -> Trace:
    """What is to be compared: on Ray steps are taken elsewhere, some of them twice."""
    true = one_process(spec, source, nudge)
    return Trace([], [], true.final) if "strikes" in spec.options else true


def one_process(spec: Spec, source: str, nudge: float = 0.0) -> Trace:
    """The truth; raises what the program raises.

    Args:
        nudge: begin from weights that differ by so much: see `judging.spread_of`.
    """
    if "loop" in spec.options:
        return operators.one_process(spec, source, NAMES, partial(nudged, by=nudge))
    is_compiled = spec.model == "compiled"  # its graph runs once
    checks = spec.seed % CHECKED == 0 and not text.has_hooks(spec) and not is_compiled
    world = World(spec.seed, spec.splits, spec.way, checks=checks)
    train, modules = prepared(spec, source)
    trace = traced(world, train, nudged(modules, nudge))
    if trace.error is not None:
        raise trace.error
    return trace


def _arguments(spec: Spec) -> tuple[Any, ...]:
    return (spec.seed, spec.splits, spec.way, spec.sync, spec.absent)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Any:
    return compile(source, "<program>", "exec")


def prepared(spec: Spec, source: str) -> tuple[Any, list[nn.Module]]:
    """The program and its modules, which are the same whenever they are made."""
    names: dict[str, Any] = dict(NAMES)
    exec(_compiled(source), names)
    torch.manual_seed(spec.seed)
    return names["train"], names["build"]()


@torch.no_grad()
def nudged(modules: list[nn.Module], by: float) -> list[nn.Module]:
    """The same, their weights a little up or down, also those at zero."""
    draws = torch.Generator().manual_seed(0)
    for parameter in {p: None for module in modules for p in module.parameters()}:
        signs = torch.rand(parameter.shape, generator=draws, dtype=torch.float64).sub(0.5).sign()
        parameter.add_(by * signs * parameter.abs().clamp(min=1.0))
    return modules


def traced(world: World, train: Any, modules: list[nn.Module]) -> Trace:
    """Run it; what was left, also by a failure."""
    error: BaseException | None = None
    try:
        train(world, modules)
    except Exception as raised:
        error = raised
    trace = Trace(world.seen, world.also, world.weights() or _weights(modules), error)
    try:
        world.end()
    except Exception as raised:
        trace.error = trace.error or raised
    return trace


def _weights(modules: list[nn.Module]) -> list[torch.Tensor]:
    return [p.detach().clone() for module in modules for p in module.parameters()]


def _hang_up(made: list[Group], traces: list[Trace | None], within_s: float) -> None:
    """When a rank has ended and another goes on waiting, it must learn that nobody comes."""
    deadline, first = time.monotonic() + within_s, 0.0
    while not all(traces) and time.monotonic() < deadline:
        time.sleep(0.001)
        if any(traces):
            first = first or time.monotonic()
            if time.monotonic() - first > GRACE_S:
                for group, trace in zip(made, traces, strict=True):
                    if trace is not None:
                        group.close()
                return


def _meet(made: list[Group]) -> bool:
    """Nothing is left in the groups that the next program would take for its own."""
    if len(made) == 1:
        return True
    answers = side_by_side(lambda rank: made[rank].exchange("met"), len(made), PATIENCE_S)
    return all(answer == ["met"] * len(made) for answer in answers)


def _is_finite(trace: Trace) -> bool:
    return all(bool(weight.isfinite().all()) for weight in trace.final)


def _nudge_of(spec: Spec) -> float:
    # torch.matrix_exp ends its series by the norm of what it gets: a gradient's, too.
    return 2**10 * NUDGE if spec.model == "orthogonal" else NUDGE


def _steps_ahead(spec: Spec) -> int:
    """How many steps of an optimizer a rank takes before the round in which it hears of a refusal.

    The steps that follow one another without a backward, where only the ranks that have changed
    gradients compare them.
    """
    if not spec.pieces() & _HEARD_LATER:
        return 0
    return 2 if "update:twice" in spec.pieces() else 1


_HEARD_LATER = {"gradients:added_after", "gradients:added_after_functionally"}

_CHANGING = {
    "gradients:weights_by_hand", "gradients:weights_by_hand_alone",
    "gradients:weights_by_hand_only", "setup:post_step", "before:through_float",
    "before:replaced_parameter", "before:other_shape", "before:tie", "before:untie",
}  # fmt: skip


def _by_hand(spec: Spec) -> bool:
    return bool(spec.pieces() & _CHANGING)
