# SPDX-License-Identifier: Apache-2.0
"""`StepExamination`: what a replay looks at besides bits, to find out why a loss rose.

For each examined step the gradient's norm by layer, before it is clipped, and the loss of each
sample by itself. A sample's own loss is computed before its shard's: with the weights from before
the step, in evaluation mode (batch norm has no statistics of one sample), and what a forward
changes is put back afterwards, so that the step keeps its bits.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from lockstep._torch_compat import sparse_indices_and_values
from lockstep.data.batch_rows import leading_length, slice_rows
from lockstep.data.sample_lists import sample_lists
from lockstep.operator.optimizer_step_hooks import OptimizerStepHooks
from lockstep.operator.preserved_state import preserve_state
from lockstep.operator.registration import registered_parts
from lockstep.tensor_tree import tree_map
from lockstep.trainer.step_inspection import StepInspection
from lockstep.worker import module_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lockstep.metrics.step_log import StepRecord
    from lockstep.operator.mixed_precision import Precision
    from lockstep.operator.shard_batch import ShardBatch
    from lockstep.operator.training_parts import TrainingParts


@dataclass(frozen=True)
class SampleLoss:
    """The loss of one sample by itself.

    Attributes:
        name: the sample's place in the dataset, or where it has none in its shard's batch.
        shard: the shard that holds it.
        loss: of a batch of this sample alone, in evaluation mode.
    """

    name: str
    shard: int
    loss: float


@dataclass(frozen=True)
class ExaminedStep:
    """A step as it was computed again.

    Attributes:
        step: global batches since the run began, this one included.
        at: its epoch, and the number of its global batch in it.
        metrics: means over its samples.
        rates: the learning rates of all parameter groups.
        norms: of the gradient, by layer; of the step that closes a window, where `accumulate` is
            larger than 1; empty where nothing stepped.
        samples: the samples, the largest loss first.
        no_samples_because: why no sample has a loss of its own; None if they have.
    """

    step: int
    at: tuple[int, int]
    metrics: Mapping[str, float]
    rates: Sequence[float]
    norms: Mapping[str, float]
    samples: Sequence[SampleLoss]
    no_samples_because: str | None = None

    @property
    def norm(self) -> float | None:
        """Of the whole gradient."""
        return math.hypot(*self.norms.values()) if self.norms else None


class StepExamination(StepInspection):
    """Examines the steps that a trainer of one process computes while `around` is entered.

    Args:
        steps: their numbers.

    Attributes:
        examined: what came out, in the order of the steps.
    """

    def __init__(self, steps: range) -> None:
        super().__init__(steps)
        self.examined: list[ExaminedStep] = []
        # By step: where gradients are accumulated, a step is on record when its window closes.
        self._norms: dict[int, dict[str, float]] = defaultdict(dict)
        self._samples: dict[int, list[SampleLoss]] = defaultdict(list)
        self._failures: dict[int, str] = {}
        self._num_losses: Counter[int] = Counter()

    @contextmanager
    def around(self, trainer: Any) -> Iterator[None]:
        operator = trainer.get_local_operator()
        run, state = registered_parts(operator), operator._lockstep
        compute_loss, actions = operator.compute_loss, state.step_actions
        actions_step = actions.step

        def compute(batch: Any, batch_info: Mapping[str, Any]) -> Any:
            self._compute_samples(operator, compute_loss, batch, batch_info)
            return compute_loss(batch, batch_info)

        def note_norms(optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
            noted = self._norms[state.committed + 1]
            for name, norm in _norms_of(run, optimizer):
                # The first look of a step counts: later ones see gradients that were clipped.
                noted.setdefault(name, norm / scale)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # A loop of the operator's own calls no `StepActions`; it may have clipped already.
            note_norms(optimizer)

        def step(
            precision: Precision,
            run: TrainingParts,
            optimizer: torch.optim.Optimizer,
            clip_grad_norm: float | None,
        ) -> None:
            device = next(run.parameters()).device
            note_norms(optimizer, float(precision.scale(torch.ones((), device=device))))
            actions_step(precision, run, optimizer, clip_grad_norm)

        operator.compute_loss = compute
        actions.step = step
        hooks = OptimizerStepHooks(operator, run)
        hooks.add(before=before_step)
        try:
            yield
        finally:
            del operator.compute_loss, actions.step
            hooks.close()

    def on_record(
        self, step: int, metrics: Mapping[str, Any], records: Sequence[StepRecord | None]
    ) -> None:
        record = records[0]
        if step not in self.steps or record is None:
            return
        samples = sorted(self._samples.pop(step, []), key=lambda each: -_orderable(each.loss))
        reason = "the operator's loop does not call compute_loss"
        self.examined.append(
            ExaminedStep(
                step,
                (record.epoch, record.index),
                {name: value for name, value in metrics.items() if isinstance(value, float)},
                record.rates,
                _by_layer(self._norms.pop(step, {})),
                samples,
                self._failures.get(step, None if samples else reason),
            )
        )

    def _compute_samples(
        self, operator: Any, compute_loss: Any, batch: Any, batch_info: Mapping[str, Any]
    ) -> None:
        step = operator._lockstep.committed + 1
        shard = self._next_shard(operator, step)
        if shard is None or shard.is_borrowed or step in self._failures:
            return
        try:
            beside_step = operator._lockstep.step_actions.beside_step()
            with (
                beside_step,
                registered_parts(operator).in_evaluation(),
                preserve_state(operator),
                torch.no_grad(),
            ):
                rows = num_rows(batch, shard)
                for row in range(rows):
                    part = slice_rows(batch, slice(row, row + 1), shard.num_samples)
                    single = tree_map(_copied, part)
                    result = compute_loss(single, batch_info)
                    loss = float(result[0] if isinstance(result, tuple) else result)
                    name = name_of_sample(shard, row, rows)
                    self._samples[step].append(SampleLoss(name, shard.shard, loss))
        except Exception as error:
            # The user's own code, which may not take a batch of one: the steps are still worth it.
            self._failures[step] = f"{type(error).__name__}: {error}"
            self._samples.pop(step, None)

    def _next_shard(self, operator: Any, step: int) -> ShardBatch | None:
        number = self._num_losses[step]
        self._num_losses[step] += 1
        return next(islice(operator._lockstep.global_batch.shards, number, None), None)


def _copied(leaf: Any) -> Any:
    """A sample of its own: what a program writes into it must not reach the batch."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _norms_of(run: TrainingParts, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, float]]:
    """The names of an optimizer's parameters, and the Euclidean norms of their gradients."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for number, module in enumerate(run.plain_modules()):
        prefix = module_prefix(run, module, number)
        for name, param in module.named_parameters(prefix):
            if id(param) in own and param.grad is not None:
                yield name, _norm(param.grad.detach())


def _norm(gradient: torch.Tensor) -> float:
    if gradient.is_sparse:
        gradient = sparse_indices_and_values(gradient.coalesce())[1]
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


def _by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """The norms of the modules that hold parameters themselves, from those of the parameters."""
    layers: dict[str, float] = {}
    for name, norm in norms.items():
        layer = name.rpartition(".")[0] or name
        layers[layer] = math.hypot(layers.get(layer, 0.0), norm)
    return layers


def num_rows(batch: Any, shard: ShardBatch) -> int:
    """How many parts of `batch`, the batch of `shard`, can be looked at by themselves.

    Raises:
        NotShardableError: nothing in the batch has rows.
    """
    is_list = any(sample_lists(batch, shard.num_samples))
    return shard.num_samples if is_list else leading_length(batch)


def name_of_sample(shard: ShardBatch, row: int, rows: int) -> str:
    """A row's place in the dataset, if the shard's batch has a row for each sample; else its own.

    Args:
        shard: whose batch it is.
        row: its number in the batch.
        rows: how many rows the batch has.
    """
    indices = () if shard.origin is None else shard.origin.indices
    are_samples = rows == len(indices) == shard.num_samples
    return f"dataset[{indices[row]}]" if are_samples else f"row {row}"


def _orderable(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def loss_name(steps: Sequence[ExaminedStep]) -> str:
    """The metric that is the loss."""
    names = steps[0].metrics if steps else {}
    return next((name for name in names if "loss" in name), next(iter(names), "train_loss"))


def outstanding_layers(
    at: ExaminedStep, steps: Sequence[ExaminedStep]
) -> list[tuple[str, float, float | None]]:
    """Layers, their norm, and how many times the median of the other steps' norms that is.

    The largest of those first.
    """
    others = [each.norms for each in steps if each is not at and each.norms]
    found: list[tuple[str, float, float | None]] = []
    for layer, norm in at.norms.items():
        usual = finite_median([each.get(layer, 0.0) for each in others])
        found.append((layer, norm, norm / usual if usual else None))
    return sorted(found, key=lambda each: -_orderable(each[1] if each[2] is None else each[2]))


def finite_median(values: Sequence[float]) -> float:
    """The median of the finite values; 0.0 if no value is finite."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else 0.0
