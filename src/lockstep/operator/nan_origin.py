# SPDX-License-Identifier: Apache-2.0
"""Which samples, and which layer first, gave the NaN or infinity for which a step was refused.

The default loop keeps the shards of an accumulation window until the window closes. When a step is
refused, the losses of these shards are computed once more, with a hook on every layer. A shard
whose loss cannot be computed again is named without a suspicion.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.errors import NonFiniteError
from lockstep.operator.default_loops import recompute_loss
from lockstep.operator.non_finite_check import FIX, SKIP_CHECK
from lockstep.operator.preserved_state import preserve_state
from lockstep.operator.registration import registered_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lockstep.operator.loop_protocols import Operator
    from lockstep.operator.shard_batch import ShardBatch


class _Recomputed(NamedTuple):
    """A shard whose loss was computed again.

    Attributes:
        place: the shard, its samples and its rank, in words.
        suspicion: the loss or layer that is not finite; None if all are finite.
        is_sure: the loss was computed again, and in the way of the loop.
    """

    place: str
    suspicion: str | None
    is_sure: bool


@contextmanager
def explain_non_finite_error(operator: Operator) -> Iterator[None]:
    """Enter around a pass over the data: a `NonFiniteError` names the samples and layers at fault.

    Collective:
        Only where a step is refused: every rank, for each finds the same gradients. One exchange.
    """
    try:
        yield
    except NonFiniteError as error:
        results = [
            _recompute_shard(operator, part, info) for part, info in _shards_of_window(operator)
        ]
        state = operator._lockstep
        has_peers = state.sync is not None and error.found_on_all_ranks
        everyone = state.context.group.exchange(results) if has_peers else [results]
        explained = _explained_error(
            error, [_Recomputed(*result) for results in everyone for result in results]
        )
        # The traceback of the refusal holds the user's line that let the optimizer step.
        raise explained.with_traceback(error.__traceback__) from None


def _explained_error(error: NonFiniteError, results: list[_Recomputed]) -> NonFiniteError:
    found = [
        f"{result.place}, {result.suspicion}" for result in results if result.suspicion is not None
    ]
    cause, fix = error.details["cause"], FIX
    if found:
        cause = None
    elif results and all(result.is_sure for result in results) and "was not taken" in error.what:
        cause = "every forward and every loss is finite: the backward is not"
        fix = f"torch.autograd.set_detect_anomaly(True) in setup names the operation; {SKIP_CHECK}"
    else:
        found = [f"the batch {result.place}" for result in results]
    explained_error = NonFiniteError(
        error.what,
        where=error.details["where"],
        got="; ".join([str(error.details["got"]), *found[:4]]),
        cause=cause,
        fix=fix,
    )
    explained_error.found_on_all_ranks = error.found_on_all_ranks
    return explained_error


def _shards_of_window(operator: Operator) -> list[tuple[ShardBatch, Mapping[str, Any]]]:
    """The shards of the gradients; in a loop of the user's own, the current batch."""
    state = operator._lockstep
    noted, joint_batch = state.window.batches, state.global_batch.joint_batch
    if noted or joint_batch is None:
        return noted
    return [(joint_batch, {"batch_idx": 0, "global_step": operator.global_step})]


def _recompute_shard(operator: Operator, part: ShardBatch, info: Mapping[str, Any]) -> _Recomputed:
    origin = "" if part.origin is None else f" ({part.origin})"
    place = (
        f"in shard {part.shard}, {part.num_samples} samples on rank {operator.world_rank}{origin}"
    )
    first: list[str] = []
    try:
        loss = _recompute_loss_with_hooks(operator, part, info, first)
    # A loop of the user's own may have another loss, and a forward that cannot be run again.
    except Exception:
        return _Recomputed(place, None, is_sure=False)
    is_sure = not operator._lockstep_overrides_loop()
    if not first and bool(loss.isfinite().all()):
        return _Recomputed(place, None, is_sure)
    layer = f", first in the output of {first[0]}" if first else ""
    return _Recomputed(place, f"the loss is {loss.item():.4g}{layer}", is_sure)


def _recompute_loss_with_hooks(
    operator: Operator, part: ShardBatch, info: Mapping[str, Any], first: list[str]
) -> torch.Tensor:
    """The loss of a shard, computed with hooks on all layers; it leaves nothing else behind."""
    run = registered_parts(operator)
    handles = [
        layer.register_forward_hook(_non_finite_output_hook(name, first))
        for module in run.plain_modules()
        for name, layer in module.named_modules()
    ]
    try:
        with preserve_state(operator), torch.no_grad():
            return recompute_loss(operator, part, info)
    finally:
        for handle in handles:
            handle.remove()


def _non_finite_output_hook(name: str, first: list[str]) -> Callable[..., None]:
    def result(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else [output]
        for tensor in tensors:
            is_number = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            if is_number and not first and not bool(tensor.isfinite().all()):
                first.append(f"`{name}` ({type(module).__name__})" if name else "the model")

    return result
