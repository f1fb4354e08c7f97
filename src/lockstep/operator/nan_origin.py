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
from lockstep.operator.default_loss import registered
from lockstep.operator.loops import loss_again
from lockstep.operator.non_finite_check import FIX, SKIP_CHECK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lockstep.operator.operator_protocol import Operator
    from lockstep.operator.step_context import ShardBatch


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
def naming_nan_origin(operator: Operator) -> Iterator[None]:
    """Enter around a pass over the data: a refusal names the samples and layers that led to it.

    Collective:
        Only where a step is refused: every rank, for each finds the same gradients. One exchange.
    """
    try:
        yield
    except NonFiniteError as error:
        looks = [_look(operator, part, info) for part, info in _shards_of_window(operator)]
        state = operator._lockstep
        has_peers = state.sync is not None and error.is_alike
        everyone = state.context.group.exchange(looks) if has_peers else [looks]
        told = _with(error, [_Recomputed(*look) for looks in everyone for look in looks])
        # The traceback of the refusal holds the user's line that let the optimizer step.
        raise told.with_traceback(error.__traceback__) from None


def _with(error: NonFiniteError, looks: list[_Recomputed]) -> NonFiniteError:
    said = [f"{look.place}, {look.suspicion}" for look in looks if look.suspicion is not None]
    cause, fix = error.details["cause"], FIX
    if said:
        cause = None
    elif looks and all(look.is_sure for look in looks) and "was not taken" in error.what:
        cause = "every forward and every loss is finite: the backward is not"
        fix = f"torch.autograd.set_detect_anomaly(True) in setup names the operation; {SKIP_CHECK}"
    else:
        said = [f"the batch {look.place}" for look in looks]
    explained_error = NonFiniteError(
        error.what,
        where=error.details["where"],
        got="; ".join([str(error.details["got"]), *said[:4]]),
        cause=cause,
        fix=fix,
    )
    explained_error.is_alike = error.is_alike
    return explained_error


def _shards_of_window(operator: Operator) -> list[tuple[ShardBatch, Mapping[str, Any]]]:
    """The shards that the gradients came from; in a loop of the user's own, the batch in hand."""
    state = operator._lockstep
    noted, delivered = state.window.batches, state.step.delivered
    if noted or delivered is None:
        return noted
    return [(delivered, {"batch_idx": 0, "global_step": operator.global_step})]


def _look(operator: Operator, part: ShardBatch, info: Mapping[str, Any]) -> _Recomputed:
    origin = "" if part.origin is None else f" ({part.origin})"
    place = (
        f"in shard {part.shard}, {part.num_samples} samples on rank {operator.world_rank}{origin}"
    )
    first: list[str] = []
    try:
        loss = _computed_again(operator, part, info, first)
    # A loop of the user's own may have another loss, and a forward that cannot be run again.
    except Exception:
        return _Recomputed(place, None, is_sure=False)
    is_sure = not operator._overrides_loop()
    if not first and bool(loss.isfinite().all()):
        return _Recomputed(place, None, is_sure)
    layer = f", first in the output of {first[0]}" if first else ""
    return _Recomputed(place, f"the loss is {loss.item():.4g}{layer}", is_sure)


def _computed_again(
    operator: Operator, part: ShardBatch, info: Mapping[str, Any], first: list[str]
) -> torch.Tensor:
    """The loss of a shard; the buffers that its forward changes are put back."""
    run = registered(operator)
    handles = [
        layer.register_forward_hook(_noting(name, first))
        for module in run.plain_modules()
        for name, layer in module.named_modules()
    ]
    buffers = [(b, b.clone()) for module in run.modules() for b in module.buffers()]
    try:
        with torch.no_grad():
            return loss_again(operator, part, info)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)


def _noting(name: str, first: list[str]) -> Callable[..., None]:
    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else [output]
        for tensor in tensors:
            is_number = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            if is_number and not first and not bool(tensor.isfinite().all()):
                first.append(f"`{name}` ({type(module).__name__})" if name else "the model")

    return look
