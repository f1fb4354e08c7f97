# SPDX-License-Identifier: Apache-2.0
"""The values that a module gave to `self.log`, as sums over shards, steps and workers.

A mean counts every sample once: each value is weighted by the samples of its batch.
"""

from __future__ import annotations

import numbers
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import ConfigurationError, NotAvailableError
from lockstep.metrics.metric_values import is_scalar
from lockstep.metrics.weighted_mean import WeightedMean, merge_means, read_means

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_REDUCTIONS: Final = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "min": "min",
    "amin": "min",
    "max": "max",
    "amax": "max",
}


_OF_BATCHES: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
_OF_RANKS: Final[dict[str, Callable[[Iterable[float]], float]]] = {
    "sum": sum,
    "min": min,
    "max": max,
}


@dataclass
class _Logged:
    """One name. Values stay on their device until the pass ends: nothing waits for a GPU.

    Attributes:
        reduction: "mean", "sum", "min" or "max".
        mean: over all batches, and over the latest step.
        reduced: the sum, minimum or maximum, where it is one.
        forks: logged for steps and for epochs.
    """

    reduction: str
    mean: WeightedMean = field(default_factory=WeightedMean)
    reduced: Any = None
    forks: bool = False

    def add(self, value: Any, weight: float, step: int, forks: bool) -> None:
        self.mean.add(value, weight, step)
        if self.reduced is None:
            self.reduced = value
        elif self.reduction != "mean":
            self.reduced = _OF_BATCHES[self.reduction](self.reduced, value)
        self.forks |= forks


class LoggedMetrics:
    """The logged values of one pass, or of one epoch, on one worker."""

    def __init__(self) -> None:
        self._logged: dict[str, _Logged] = {}
        self.metrics: dict[str, str] = {}
        """Names under which metric objects were logged, and where the module has these."""

    def add(
        self, name: str, value: Any, reduction: str, weight: float, step: int, forks: bool
    ) -> None:
        """`value` (a scalar tensor) of a batch that counts `weight`, in global batch `step`."""
        logged = self._logged.setdefault(name, _Logged(reduction))
        if logged.reduction != reduction:
            raise ConfigurationError(
                f"self.log({name!r}, ...) was called with two ways to reduce",
                expected=f"reduce_fx={logged.reduction!r}, as before",
                got=f"reduce_fx={reduction!r}",
            )
        logged.add(value, weight, step, forks)

    def plain(self) -> dict[str, Any]:
        """The same as plain numbers, for the other ranks."""
        means = read_means({name: each.mean for name, each in self._logged.items()})
        return {
            "metrics": self.metrics,
            "values": {
                name: (each.reduction, astuple(means[name]), float(each.reduced), each.forks)
                for name, each in self._logged.items()
            },
        }


def merged(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """All ranks' `LoggedMetrics.plain()` as one result: each name, and ``last_<name>``.

    A name that was logged for steps and for epochs is there as ``<name>_step`` and
    ``<name>_epoch`` too, as in Lightning.
    """
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for each in ranks for name in each["values"]):
        reductions, means, reduced, forks = zip(
            *(each["values"][name] for each in ranks if name in each["values"]), strict=True
        )
        value, latest = merge_means([WeightedMean(*mean) for mean in means])
        if reductions[0] != "mean":
            value = _OF_RANKS[reductions[0]](reduced)
        result[name] = value
        result.setdefault(f"last_{name}", latest)
        if any(forks):
            result[f"{name}_epoch"], result[f"{name}_step"] = value, latest
    return result


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
