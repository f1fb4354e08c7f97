# SPDX-License-Identifier: Apache-2.0
"""Running weighted means on one worker, in constant memory and without device waits."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.keys import BATCH_COUNT, NUM_SAMPLES, WEIGHT
from lockstep.metrics.merge_over_workers import merge
from lockstep.metrics.metric_values import addable, as_summand, is_array, is_same_value, shape_of
from lockstep.metrics.weighted_mean import WeightedMean, as_weight, read_means

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_COUNTERS = (BATCH_COUNT, NUM_SAMPLES, WEIGHT)


class AverageMeter:
    """The latest value and the weighted mean of a series.

    Attributes:
        val: the latest value.
        avg: the weighted mean so far; 0 before the first update.
        sum: the sum of value times weight.
        count: the sum of weights.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val: Any = 0
        self.avg: Any = 0
        self.sum: Any = 0
        self.count: float = 0

    def update(self, val: Any, n: float = 1) -> None:
        """Count `val` with weight `n`; a weight of 0 changes nothing.

        Of a tensor, `val`, `avg` and `sum` are tensors on its device, in float64 and without graph.
        """
        n = as_weight(n)
        if n == 0:
            return
        self.val = addable(val)
        self.sum = self.sum + self.val * n
        self.count += n
        self.avg = self.sum / self.count


class AverageMeterCollection:
    """Weighted means of whatever metrics a loop reports, in constant memory.

    By default every `update` is one step. A loop that runs several parts (shards) of one
    global batch, or that several workers share, calls `begin_step` before the first part; from
    then on only `begin_step` starts a step, and the ``last_*`` results are means over all parts of
    the latest one.

    Attributes:
        n: the samples so far.
    """

    # Of what cannot be averaged, only arrays are to be the same in all batches: of other values the
    # latest is what a loop means to tell (the rates of a schedule, the name of a file).
    _tells_all_changes = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all metrics and steps."""
        self.n: float = 0
        self._batch_count = 0
        self._step = 0
        self._has_explicit_steps = False
        self._means: defaultdict[str, WeightedMean] = defaultdict(WeightedMean)
        self._others: dict[str, Any] = {}
        self._varied: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no metric has been counted and no step has begun."""
        return self._batch_count == 0

    def copy(self) -> AverageMeterCollection:
        """A copy with the same sums, which the original does not share with it."""
        other = copy.copy(self)
        other._means = defaultdict(WeightedMean)
        other._means.update({key: copy.copy(mean) for key, mean in self._means.items()})
        other._others = dict(self._others)
        other._varied = set(self._varied)
        return other

    def begin_step(self, step: int = 0) -> None:
        """Start a step: one global batch, of which this worker may report several parts.

        Args:
            step: the step's number, the same on every worker, so that `merge` can compare workers
                that joined at different steps; at least one more than the last step's is taken.
        """
        self._has_explicit_steps = True
        self._start_step(step)

    def _start_step(self, step: int) -> None:
        self._step = max(step, self._step + 1)
        self._batch_count += 1

    def update(
        self,
        metrics: Mapping[str, Any],
        n: float = 1,
        partial: Mapping[str, float] | None = None,
    ) -> None:
        """Count what one batch, or one part of a global batch, reported.

        Args:
            metrics: numbers (Python's, numpy's, tensors of one element on any device) are
                averaged, and element by element tensors and arrays of numbers that keep their
                shape, of up to 65,536 elements; of any other value the latest is kept.
                ``num_samples`` and ``batch_count`` are not metrics and are left out.
                ``metrics[WEIGHT]``, if it is there, is the weight of the metrics (tokens, say).
                The mapping is not changed.
            n: the number of samples, which is also the weight where `metrics` has no ``WEIGHT``. A
                weight of 0 (a borrowed batch, or one without tokens) leaves every metric, its
                latest value included, as it was; the step itself still counts.
            partial: the weight of each metric that has one of its own: only a part of the batch
                reported it, or it is a mean over something else than samples.

        Raises:
            WeightError: `n` or the weight is negative, NaN or infinite.
        """
        n = as_weight(n)
        weight = as_weight(metrics.get(WEIGHT, n)) if n else 0
        if not self._has_explicit_steps:
            self._start_step(0)
        self.n += n
        if weight == 0:
            return
        for key, value in metrics.items():
            if key in _COUNTERS:
                continue
            counts = partial.get(key, weight) if partial else weight
            if counts == 0:
                continue  # a mean over nothing, which may be NaN
            self._count(str(key), value, counts)

    def note_varied(self, names: Iterable[str]) -> None:
        """Note that metrics which cannot be averaged were not the same in all parts of a batch."""
        self._varied.update(names)

    def _count(self, name: str, value: Any, weight: float) -> None:
        summand, mean = as_summand(value), self._means.get(name)
        # A number beside None now and then is averaged; an array, only among its like.
        if mean is None:
            is_mixed = shape_of(summand) != () and name in self._others
        else:
            is_mixed = shape_of(summand) != shape_of(mean.total)
        if summand is not None and not is_mixed and name not in self._varied:
            self._means[name].add(summand, weight, self._step)
            return
        if isinstance(value, Tensor):
            value = value.detach()
        if name not in self._varied and (is_mixed or self._is_another_value(name, value)):
            self._varied.add(name)
        if is_mixed:
            self._means.pop(name, None)
        self._others[name] = value

    def _is_another_value(self, name: str, value: Any) -> bool:
        before = self._others.get(name, value)
        is_told = self._tells_all_changes or is_array(before) or is_array(value)
        return is_told and not is_same_value(before, value)

    def state(self) -> dict[str, Any]:
        """This worker's sums, which `merge` divides, as plain Python numbers on the CPU.

        Waits once for each device that holds metrics.

        Returns:
            ``batch_count``, ``num_samples``; ``sums``, a `WeightedMean` for each metric;
            ``others``, the latest value of each metric that cannot be averaged; ``varied``, the
            names of those that were other arrays or shapes before (in `ValidationMeters`, any other
            value), or not the same in all parts of a batch.
        """
        return {
            BATCH_COUNT: self._batch_count,
            NUM_SAMPLES: self.n,
            "sums": read_means(self._means),
            "others": {
                key: value.cpu() if isinstance(value, Tensor) else value
                for key, value in self._others.items()
            },
            "varied": sorted(self._varied),
        }

    def summary(self) -> dict[str, Any]:
        """``batch_count``, ``num_samples``, and per metric ``k`` its mean and ``last_k``."""
        return merge([self.state()])


class ValidationMeters(AverageMeterCollection):
    """Of a validation, where nothing is scheduled: what varies differs from batch to batch."""

    _tells_all_changes = True
