# SPDX-License-Identifier: Apache-2.0
"""The same lines of a program under every way to synchronise that runs on threads.

What a program is compared with is written beside it: one process, plain autograd, float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from harness import assert_equal_on_all_ranks, assert_same, outcomes, reset
from lockstep.errors import PeerLostError
from lockstep.group import Group
from lockstep.sync import ParameterServerSync, replicate
from lockstep.sync.ddp_sync import DDPSync
from ranks.programs import X, Y, mlp
from ranks.served import server
from ranks.test_replicate_exact import weights

WAYS = ("replicate", "ddp", "parameter_server")

every_way = pytest.mark.parametrize("way", WAYS)
our_buckets = pytest.mark.parametrize("way", ["replicate", "parameter_server"])

Made = torch.optim.Optimizer | list[torch.optim.Optimizer]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def mean_square(model: nn.Module, part: slice = slice(None)) -> torch.Tensor:
    """The mean over the rows of `part`."""
    return ((model(X[part]) - Y[part]) ** 2).sum(dim=1).mean()


@dataclass
class Rank:
    """What a program has in its hands on one rank.

    Attributes:
        plain: the module that was built.
        model: what the program calls: it, or DDP's wrapper around it.
        optimizers: made before attaching.
    """

    group: Group
    plain: nn.Module
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    sync: Any

    @property
    def number(self) -> int:
        return self.group.rank

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.plain.parameters())


def built(build: Callable[[], nn.Module] = mlp) -> nn.Module:
    """A replica; they all start alike."""
    return reset(build(), seed=7)


def as_list(made: Made) -> list[torch.optim.Optimizer]:
    return made if isinstance(made, list) else [made]


@contextmanager
def attached(
    way: str,
    group: Group,
    plain: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    address: Any,
    **options: Any,
) -> Iterator[Rank]:
    """One rank with its sync, which is detached afterwards."""
    model = plain
    ddp_args = options.pop("ddp_args", {})
    if way == "replicate":
        sync: Any = replicate(plain, group=group, **options)
    elif way == "ddp":
        sync = DDPSync([plain], group, ddp_args=ddp_args, **options)
        (model,) = sync.models
    else:
        sync = ParameterServerSync([plain], optimizers, group, address, **options)
    try:
        yield Rank(group, plain, model, optimizers, sync)
    finally:
        sync.detach()


def results_of(
    way: str,
    body: Callable[[Rank], Any],
    *,
    build: Callable[[], nn.Module] = mlp,
    make: Callable[[nn.Module], Made] = momentum,
    size: int = 2,
    before: Callable[[nn.Module], Any] = lambda plain: None,
    **options: Any,
) -> tuple[list[Any], list[nn.Module]]:
    """`body` on `size` ranks: its results (or exceptions) by rank, and the modules.

    Args:
        before: what a program does to its module before it attaches.
        options: of the sync.
    """
    replicas = [built(build) for _ in range(size)]
    made = [as_list(make(plain)) for plain in replicas]
    for plain in replicas:
        before(plain)

    def one_rank(group: Group, address: Any) -> Any:
        plain, optimizers = replicas[group.rank], made[group.rank]
        with attached(way, group, plain, optimizers, address, **options) as rank:
            return body(rank)

    with server(size if way == "parameter_server" else 1) as address:
        return outcomes(size, lambda group: one_rank(group, address)), replicas


def on_ranks(way: str, body: Callable[[Rank], Any], **options: Any) -> list[Any]:
    """What `body` returns, by rank."""
    results, _ = results_of(way, body, **options)
    failures = [result for result in results if isinstance(result, BaseException)]
    # A rank that lost its peer says less than the peer.
    for failure in sorted(failures, key=lambda one: isinstance(one, PeerLostError)):
        raise failure
    return results


def assert_exact(results: list[Any], true: list[Mapping[str, torch.Tensor | None]]) -> None:
    """Each rank's list is the oracle's; and bit for bit the other ranks'."""
    for step, expected in enumerate(true):
        assert_equal_on_all_ranks([seen[step] for seen in results])
        assert_same(results[0][step], dict(expected))
    assert [len(seen) for seen in results] == [len(true)] * len(results)


def refused(
    way: str, code: str, body: Callable[[Rank], Any], *, moved: bool = False, **options: Any
) -> list[Any]:
    """`body` raises the error with `code` on every rank; unless `moved`, no weight has moved."""
    results, replicas = results_of(way, body, **options)
    assert [getattr(result, "code", result) for result in results] == [code] * len(results), results
    start = weights([built(options.get("build", mlp))])
    for plain in replicas:
        if not moved:
            assert_same(weights([plain]), start, tolerance=0.0)
    return results
