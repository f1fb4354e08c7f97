# SPDX-License-Identifier: Apache-2.0
"""Asserts that ranks compute the gradients of one process, in lockstep's tests and in users'.

This module needs torch, and no Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.batch_dependent_layers import freeze_batch_dependent_layers
from lockstep.data.batch_rows import leading_length, slice_rows
from lockstep.data.shard_assignment import shard_bounds
from lockstep.errors import ConfigurationError, ParityError
from lockstep.group import Group
from lockstep.no_dropout_mode import NoDropoutMode
from lockstep.parity import compare
from lockstep.randomness import preserve_rng_state
from lockstep.reduction_context import ReductionContext, activate
from lockstep.sync import GradientSync
from lockstep.testing.rank_threads import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from lockstep.parity import ParityReport


def assert_parity(
    step_fn: Callable[[nn.Module, Any], torch.Tensor | None],
    make_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    world_size: int = 2,
) -> ParityReport:
    """Assert that N ranks compute the gradients that one process computes.

    ::

        def step(model, batch):
            features, targets = batch
            return nn.functional.cross_entropy(model(features), targets)

        def test_my_model():
            lockstep.testing.assert_parity(step, MyModel, [(features, targets)])

    Args:
        step_fn: ``(model, batch) -> loss``, the mean over the batch; or it calls
            ``loss.backward()`` itself and returns None. `gather`, `global_mean` and `info_nce` in
            it communicate as in a trainer.
        make_model: makes the model; called once per rank, from the same random numbers.
        batches: *global* batches, of any nesting; each is cut into `world_size` parts along
            the first dimension, the first ones larger.
        world_size: ranks.

    Returns:
        The report: of the first batch that differs, else of the last one.

    Raises:
        ParityError: gradients differ (an AssertionError); its text holds the report.
    """
    if not batches:
        raise ConfigurationError("assert_parity needs at least one batch")
    report = None
    for batch in batches:
        report = _compare_with_one_process(step_fn, make_model, batch, world_size)
        if not report.ok:
            raise ParityError(f"the ranks' gradients are not those of one process\n{report}")
    assert report is not None
    return report


def _compare_with_one_process(
    step_fn: Callable[[nn.Module, Any], torch.Tensor | None],
    make_model: Callable[[], nn.Module],
    batch: Any,
    world_size: int,
) -> ParityReport:
    models: list[nn.Module] = []
    for _ in range(world_size + 1):
        with preserve_rng_state(0):
            models.append(make_model())
    notes = [note for model in models for note in freeze_batch_dependent_layers(model)]
    alone, *replicas = models
    with NoDropoutMode(), activate(ReductionContext(Group(None))):
        loss = step_fn(alone, batch)
        if loss is not None:
            loss.backward()
    size = leading_length(batch)

    def body(group: Group) -> dict[str, torch.Tensor | None]:
        model = replicas[group.rank]
        start, stop = shard_bounds(size, world_size, group.rank)
        rows = stop - start
        # A rank without rows computes on the batch's first row with weight 0, so that it takes part
        # in the collectives.
        part = slice_rows(batch, slice(start, stop) if rows else slice(1))
        sync = GradientSync([model], group)
        sync.set_delivered_weight(rows)
        # As in a trainer: a gather in the loss finds its group here, and leaves out the row that
        # is another rank's.
        reduction = ReductionContext(group, weight=rows, is_borrowed=rows == 0)
        try:
            with NoDropoutMode(), activate(reduction):
                loss = step_fn(model, part)
                if loss is not None:
                    sync.backward(loss, weight=rows)
            return _copy_gradients(model)
        finally:
            sync.detach()

    return compare(_copy_gradients(alone), run_ranks(world_size, body), sorted(set(notes)))


def _copy_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }
