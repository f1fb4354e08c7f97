# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads over real gloo, and the measure in which gradients are held to the oracle.

Threads share torch's global random numbers and the global optimizer hooks: seed through an
explicit generator, and build what ranks must have in common before they start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import PeerLostError
from lockstep.group import Group

TOLERANCE = 1e-12
FLOOR = 1e-3


def ring(size: int, timeout_s: float = 20.0) -> Callable[[int], Group]:
    """One fresh process group of `size` ranks; call it with a rank, on that rank's thread."""
    store = dist.HashStore()

    def join(rank: int) -> Group:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        return Group(backend)

    return join


def run_ranks(size: int, body: Callable[[Group], Any], *, timeout_s: float = 20.0) -> list[Any]:
    """Run `body(group)` once per rank, as threads. Returns by rank; raises the first failure."""
    results = outcomes(size, body, timeout_s=timeout_s)
    failures = [result for result in results if isinstance(result, BaseException)]
    # A rank that lost its peer says less than the peer.
    for failure in sorted(failures, key=lambda one: isinstance(one, PeerLostError)):
        raise failure
    return results


def outcomes(size: int, body: Callable[[Group], Any], *, timeout_s: float = 20.0) -> list[Any]:
    """As `run_ranks`, but a rank's exception is its result. A rank that ends closes its group."""
    join = ring(size, timeout_s)
    results: list[Any] = [None] * size
    # A rank that is done closes its sockets, also those to which a slower one still connects.
    all_have_joined = threading.Barrier(size)

    def joined(rank: int) -> Group:
        try:
            return join(rank)
        except BaseException:
            all_have_joined.abort()
            raise

    def one(rank: int) -> None:
        group = None
        try:
            group = joined(rank)
            all_have_joined.wait(timeout_s)
            results[rank] = body(group)
        except BaseException as error:
            results[rank] = error
        finally:
            if group is not None:
                group.close()

    side_by_side(one, size)
    return results


class _Shown(SimpleNamespace):
    """Another object's names; the compiler looks some of them up, and hashes it."""

    __hash__ = object.__hash__


@contextmanager
def random_state_by_turns() -> Iterator[None]:
    """Ranks that are threads read and write the state of torch's one generator by turns.

    Torch holds the generator's lock and waits for the interpreter's while it makes the tensor;
    another thread holds that one and waits for the generator's.
    """
    turn, names = threading.RLock(), ("get_rng_state", "set_rng_state", "manual_seed")
    originals: dict[str, Any] = {name: getattr(torch, name) for name in names}
    generator = torch.default_generator

    def by_turns(call: Callable[..., Any]) -> Callable[..., Any]:
        def one_at_a_time(*arguments: Any) -> Any:
            with turn:
                return call(*arguments)

        return one_at_a_time

    for name, call in originals.items():
        setattr(torch, name, by_turns(call))
    shown = {name: getattr(generator, name) for name in dir(generator) if name[0] != "_"}
    shown["manual_seed"] = by_turns(generator.manual_seed)
    torch.default_generator = _Shown(**shown)
    try:
        yield
    finally:
        torch.default_generator = generator
        for name, call in originals.items():
            setattr(torch, name, call)


def side_by_side(one: Callable[[int], None], size: int) -> None:
    """`one(rank)` for every rank, each on a thread, until all have ended."""
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    with random_state_by_turns():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Ranks are processes to DDP: two that leave its forward in the order in which they came put
    # each other back as the one that is inside, for the compiler to ask in some later test.
    DistributedDataParallel._active_ddp_module = None


def gradients(*modules: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """A copy of every parameter's gradient, None where there is none."""
    return {
        f"{position}.{name}": None if param.grad is None else param.grad.detach().clone()
        for position, module in enumerate(modules)
        for name, param in module.named_parameters()
    }


def assert_same(
    got: dict[str, torch.Tensor | None],
    true: dict[str, torch.Tensor | None],
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """||g - g*|| <= tolerance * max(||g*||, 1e-3 ||all g*||), and None exactly where None."""
    assert got.keys() == true.keys()
    whole = torch.stack([g.norm() for g in true.values() if g is not None] or [torch.zeros(())])
    floor = FLOOR * whole.norm()
    for name, reference in true.items():
        value = got[name]
        assert (value is None) == (reference is None), f"{name}: {value} against {reference}"
        if value is not None and reference is not None:
            error = (value - reference).norm()
            bound = tolerance * torch.maximum(reference.norm(), floor)
            assert error <= bound, f"{name}: off by {error:.3e}, allowed {bound:.3e}"


def assert_equal_on_all_ranks(results: Iterable[dict[str, torch.Tensor | None]]) -> None:
    """Bit for bit: what ranks step with must not drift."""
    first, *others = results
    for other in others:
        for name, reference in first.items():
            value = other[name]
            same = value is None if reference is None else torch.equal(value, reference)
            assert same, name


def generator(*seed: int) -> torch.Generator:
    """Numbers that depend on the seed alone, on any thread."""
    made = torch.Generator()
    made.manual_seed(sum(part * 1009**place for place, part in enumerate(seed, start=1)))
    return made


def reset(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """float64, with weights that depend on `seed` alone."""
    module.double()
    source = generator(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=source, dtype=torch.float64) * 0.4)
    return module


def rows(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=generator(seed), dtype=torch.float64)


def cut(total: int, counts: list[int]) -> list[slice]:
    """Consecutive slices of `counts` rows."""
    assert sum(counts) == total
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
