# SPDX-License-Identifier: Apache-2.0
"""What led to a step that was refused: the samples, and the first layer that was not finite.

Found by computing the losses of the step's batches once more, for which those of a window stay
at hand until it closes. Nothing is said of what could not be computed again.
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

    from lockstep.operator.interface import Operator
    from lockstep.operator.shard_batch import ShardBatch


class _Look(NamedTuple):
    """One part, computed again.

    Attributes:
        place: its shard, samples and rank, in words.
        suspicion: what of it is not finite; None if nothing is.
        is_sure: its loss was computed again, and as the loop had computed it.
    """

    place: str
    suspicion: str | None
    is_sure: bool


@contextmanager
def explained(operator: Operator) -> Iterator[None]:
    """Around a pass over the data: which samples, and which module, led to a refusal?

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
        told = _with(error, [_Look(*look) for looks in everyone for look in looks])
        # The user's line that let the optimizer step is in the traceback of the refusal.
        raise told.with_traceback(error.__traceback__) from None


def _with(error: NonFiniteError, looks: list[_Look]) -> NonFiniteError:
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
    """The parts that the gradients came from; of a loop of the user's own, the batch in hand."""
    noted, delivered = operator._lockstep.window.batches, operator._lockstep.step.delivered
    if noted or delivered is None:
        return noted
    return [(delivered, {"batch_idx": 0, "global_step": operator.global_step})]


def _look(operator: Operator, part: ShardBatch, info: Mapping[str, Any]) -> _Look:
    origin = "" if part.origin is None else f" ({part.origin})"
    place = (
        f"in shard {part.shard}, {part.num_samples} samples on rank {operator.world_rank}{origin}"
    )
    first: list[str] = []
    try:
        loss = _computed_again(operator, part, info, first)
    # A loop of the user's own may have another loss, and a forward that cannot be had again.
    except Exception:
        return _Look(place, None, is_sure=False)
    is_sure = not operator._overrides_loop()
    if not first and bool(loss.isfinite().all()):
        return _Look(place, None, is_sure)
    layer = f", first in the output of {first[0]}" if first else ""
    return _Look(place, f"the loss is {loss.item():.4g}{layer}", is_sure)


def _computed_again(
    operator: Operator, part: ShardBatch, info: Mapping[str, Any], first: list[str]
) -> torch.Tensor:
    """The loss of a part; its forward leaves the buffers as they are."""
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
