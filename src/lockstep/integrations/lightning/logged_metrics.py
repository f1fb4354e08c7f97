# SPDX-License-Identifier: Apache-2.0
"""What `self.log` was told, as sums that add up over shards, steps and workers.

A mean counts every sample once: each value weighs what its batch holds, whoever computed it.
"""

from __future__ import annotations

import numbers
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import ConfigurationError, NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_REDUCTIONS: Final = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "min": "min",
    "amin": "min",
    "max": "max",
    "amax": "max",
}


@dataclass
class _Entry:
    """One name. Values stay on their device until the pass ends: nothing waits for a GPU."""

    reduction: str
    total: Any
    weight: float
    latest: Any
    latest_weight: float
    latest_step: int
    forks: bool

    def add(self, value: Any, weight: float, step: int, forks: bool) -> None:
        if self.reduction == "mean":
            self.total = self.total + value * weight
            self.weight += weight
        elif self.reduction == "sum":
            self.total = self.total + value
        else:
            pick = torch.minimum if self.reduction == "min" else torch.maximum
            self.total = pick(self.total, value)
        if step != self.latest_step:
            self.latest, self.latest_weight, self.latest_step = 0.0, 0.0, step
        self.latest = self.latest + value * weight
        self.latest_weight += weight
        self.forks |= forks

    def plain(self) -> tuple[Any, ...]:
        """Its fields in their order, as plain numbers; ``_Entry(*plain)`` is the same again."""
        return astuple(replace(self, total=float(self.total), latest=float(self.latest)))


class Sums:
    """The logged values of one pass, or of one epoch, on one worker."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self.metrics: dict[str, str] = {}
        """Names under which metric objects were logged, and where the module has these."""

    def add(
        self, name: str, value: Any, reduction: str, weight: float, step: int, forks: bool
    ) -> None:
        """`value` (a scalar tensor) of a batch that counts `weight`, in global batch `step`."""
        entry = self._entries.get(name)
        if entry is None:
            mean = reduction == "mean"
            total = value * weight if mean else value
            self._entries[name] = _Entry(
                reduction, total, weight, value * weight, weight, step, forks
            )
            return
        if entry.reduction != reduction:
            raise ConfigurationError(
                f"self.log({name!r}, ...) was called with two ways to reduce",
                expected=f"reduce_fx={entry.reduction!r}, as before",
                got=f"reduce_fx={reduction!r}",
            )
        entry.add(value, weight, step, forks)

    def plain(self) -> dict[str, Any]:
        """The same as plain numbers, for the peers."""
        return {
            "metrics": self.metrics,
            "entries": {name: each.plain() for name, each in self._entries.items()},
        }


def merged(everyone: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """All ranks' `Sums.plain()` as one result: each name, and ``last_<name>``.

    A name that was logged for steps and for epochs is there as ``<name>_step`` and
    ``<name>_epoch`` too, as in Lightning.
    """
    result: dict[str, float] = {}
    names = dict.fromkeys(name for each in everyone for name in each["entries"])
    for name in names:
        heard = [_Entry(*each["entries"][name]) for each in everyone if name in each["entries"]]
        value, latest = _whole(heard), _latest(heard)
        result[name] = value
        result.setdefault(f"last_{name}", latest)
        if any(each.forks for each in heard):
            result[f"{name}_epoch"], result[f"{name}_step"] = value, latest
    return result


def _whole(heard: Sequence[_Entry]) -> float:
    reduction = heard[0].reduction
    if reduction == "mean":
        return _mean([(each.total, each.weight) for each in heard])
    pick: dict[str, Callable[[list[float]], float]] = {"sum": sum, "min": min, "max": max}
    return pick[reduction]([each.total for each in heard])


def _latest(heard: Sequence[_Entry]) -> float:
    step = max(each.latest_step for each in heard)
    return _mean([(each.latest, each.latest_weight) for each in heard if each.latest_step == step])


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    weight = sum(weight for _, weight in pairs)
    # Logged by a hook before any batch: each rank's total is zero times its value.
    return sum(total for total, _ in pairs) / weight if weight else float("nan")


def reduction_named(reduce_fx: Any, name: str) -> str:
    """Which of the four reductions Lightning's `reduce_fx` is."""
    given = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    known = _REDUCTIONS.get(given.lower())
    if known is None:
        raise NotAvailableError(
            f"self.log({name!r}, ..., reduce_fx={given or reduce_fx!r}) is not supported",
            expected='"mean", "sum", "min" or "max"',
            cause="the value has to add up over steps and workers",
            fix="log a torchmetrics object, which knows how to",
        )
    return known


def scalar(value: Any, name: str) -> torch.Tensor:
    """`value` as a scalar of float64, on its device, without its graph."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(torch.float64)
    if isinstance(value, numbers.Real):
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    raise ConfigurationError(
        f"self.log({name!r}, ...) was given something that is no number",
        expected="a number, a tensor of one element, or a torchmetrics object",
        got=f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__,
        fix="self.log_dict(...) for a dict; .mean() for a tensor of several elements",
    )
