# SPDX-License-Identifier: Apache-2.0
"""Sums the values that a module passes to `self.log` over shards, steps and workers.

A mean counts every sample once: each value has its batch's number of samples as its weight.
"""

from __future__ import annotations

import numbers
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.metrics.metric_values import is_scalar
from lockstep.metrics.weighted_mean import WeightedMean, merge_means, read_means

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


_COMBINE_BATCHES: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


def _smallest(values: Sequence[float]) -> float:
    return torch.tensor(values, dtype=torch.float64, device="cpu").amin().item()


def _largest(values: Sequence[float]) -> float:
    return torch.tensor(values, dtype=torch.float64, device="cpu").amax().item()


_COMBINE_RANKS: Final[dict[str, Callable[[Sequence[float]], float]]] = {
    "sum": sum,
    # Rejected: Python's `min` and `max`, which keep a NaN of the first rank alone.
    "min": _smallest,
    "max": _largest,
}


@dataclass
class _LoggedValue:
    """The values logged under one name. They stay on their device until the pass ends.

    Attributes:
        reduction: "mean", "sum", "min" or "max".
        mean: the weighted mean over all batches, and that over the latest step.
        reduced: the sum, minimum or maximum over all batches; unused for "mean".
        both_levels: whether the name was logged for steps and for epochs.
    """

    reduction: str
    mean: WeightedMean = field(default_factory=WeightedMean)
    reduced: Any = None
    both_levels: bool = False

    def add(self, value: Any, weight: float, step: int, both_levels: bool) -> None:
        self.mean.add(value, weight, step)
        if self.reduced is None:
            self.reduced = value
        elif self.reduction != "mean":
            self.reduced = _COMBINE_BATCHES[self.reduction](self.reduced, value)
        self.both_levels |= both_levels


class LoggedMetrics:
    """The logged values of one pass, or of one epoch, on one worker."""

    def __init__(self) -> None:
        self._logged: dict[str, _LoggedValue] = {}
        self.metrics: dict[str, str] = {}
        """For each name under which a metric object was logged, its submodule's name."""

    def add(
        self, name: str, value: Any, reduction: str, weight: float, step: int, both_levels: bool
    ) -> None:
        """Add `value` (a scalar tensor) with `weight`, logged in global batch `step`."""
        logged = self._logged.setdefault(name, _LoggedValue(reduction))
        if logged.reduction != reduction:
            raise ConfigurationError(
                f"self.log({name!r}, ...) was called with two ways to reduce",
                expected=f"reduce_fx={logged.reduction!r}, as before",
                got=f"reduce_fx={reduction!r}",
            )
        logged.add(value, weight, step, both_levels)

    def copy(self) -> LoggedMetrics:
        """The same values; what is logged later goes into one of the two."""
        copied = LoggedMetrics()
        copied.metrics = dict(self.metrics)
        copied._logged = {
            name: replace(each, mean=replace(each.mean)) for name, each in self._logged.items()
        }
        return copied

    def to_plain(self) -> dict[str, Any]:
        """The values as plain numbers, to be sent to the other ranks."""
        means = read_means({name: each.mean for name, each in self._logged.items()})
        return {
            "metrics": self.metrics,
            "values": {
                name: (each.reduction, astuple(means[name]), float(each.reduced), each.both_levels)
                for name, each in self._logged.items()
            },
        }


def merge_ranks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Merge all ranks' `LoggedMetrics.to_plain()` into one result: each name, and ``last_<name>``.

    A name that was logged for steps and for epochs also gets ``<name>_step`` and ``<name>_epoch``,
    as in Lightning.
    """
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for each in ranks for name in each["values"]):
        reductions, means, reduced, both_levels = zip(
            *(each["values"][name] for each in ranks if name in each["values"]), strict=True
        )
        value, latest = merge_means([WeightedMean(*mean) for mean in means])
        if reductions[0] != "mean":
            value = _COMBINE_RANKS[reductions[0]](reduced)
        result[name] = value
        result.setdefault(f"last_{name}", latest)
        if any(both_levels):
            result[f"{name}_epoch"], result[f"{name}_step"] = value, latest
    return result


def parse_reduction(reduce_fx: Any, name: str) -> str:
    """Map Lightning's `reduce_fx` to "mean", "sum", "min" or "max"."""
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


def as_scalar(value: Any, name: str) -> torch.Tensor:
    """`value` as a scalar tensor of float64 on its device, detached from its graph."""
    if is_scalar(value):
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
