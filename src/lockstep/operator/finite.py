# SPDX-License-Identifier: Apache-2.0
"""No step puts a first NaN or infinity into the weights, and what led to one is named.

Gradients are looked at when an optimizer is about to step with them: after the reduction, so
that every rank finds the same; after unscaling and clipping; and not where a GradScaler leaves
the step out. One norm over all of them: half of what plain SGD's own pass costs.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.errors import NonFiniteError
from lockstep.sync import is_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from lockstep.operator import TrainingOperator
    from lockstep.operator.staging import Part

_FIX: Final = (
    "look at these samples and layers (log or sqrt of 0, a division by an empty count, a learning"
    " rate that is too large); TorchTrainer(check_finite=False) steps all the same"
)


def watch_optimizers(operator: TrainingOperator) -> list[RemovableHandle]:
    """Have each registered optimizer refuse a step that is not finite."""
    run = operator._lockstep.registered
    if run is None or not operator._lockstep.setting.options.check_finite:
        return []

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        _refuse_non_finite(operator, optimizer)

    return [optimizer.register_step_pre_hook(refuse) for optimizer in run.optimizers]


def _refuse_non_finite(operator: TrainingOperator, optimizer: torch.optim.Optimizer) -> None:
    if getattr(optimizer, "found_inf", None) is not None:
        return  # fused: it is told of infinities, and leaves the step out by itself
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not held or _are_finite([p.grad for p in held if p.grad is not None]):
        return
    run = operator._lockstep.registered
    assert run is not None
    names = {id(p): name for module in run.modules() for name, p in module.named_parameters()}
    found = [p for p in held if p.grad is not None and not _are_finite([p.grad])]
    shown = ", ".join(f"`{names.get(id(p), tuple(p.shape))}`" for p in found[:4])
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    error = NonFiniteError(
        "a step would put NaN or infinity into the weights, and was not taken",
        where=f"rank {operator.world_rank}, step {operator.global_step}",
        got=f"the gradient of {shown}{more}",
        cause="a loss or a gradient that is not finite, on this rank or on another",
        fix=_FIX,
    )
    error.is_alike = not any(is_local(p) for p in found)
    raise error


def _are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    dense = [g._values() if g.is_sparse else g for g in gradients]
    if bool(torch.nn.utils.get_total_norm(dense).isfinite()):
        return True
    # The squares of large numbers may overflow where the numbers do not.
    return all(bool(gradient.isfinite().all()) for gradient in dense)


@contextmanager
def explained(
    operator: TrainingOperator, parts: Sequence[Part], loss_of: Callable[[Part], torch.Tensor]
) -> Iterator[None]:
    """Around the step of the default loop: which samples, and which module, led to a refusal?

    Args:
        parts: this rank's shards of the global batch.
        loss_of: computes a shard's loss once more.

    Collective:
        Only where a step is refused: every rank, for each finds the same gradients. One exchange.
    """
    try:
        yield
    except NonFiniteError as error:
        suspects = [_suspect(operator, part, loss_of) for part in parts]
        mine = [suspect for suspect in suspects if suspect is not None]
        group = operator._lockstep.setting.group
        has_peers = operator._lockstep.sync is not None and error.is_alike
        everyone = group.exchange(mine) if has_peers else [mine]
        said = [line for lines in everyone for line in lines]
        raise NonFiniteError(
            error.what,
            where=error.details["where"],
            got="; ".join([str(error.details["got"]), *said[:4]]),
            cause=None if said else "every forward and every loss is finite: the backward is not",
            fix=_FIX,
        ) from None


def _suspect(
    operator: TrainingOperator, part: Part, loss_of: Callable[[Part], torch.Tensor]
) -> str | None:
    """What of a shard is not finite, in words; this forward leaves the buffers as they are."""
    run = operator._lockstep.registered
    assert run is not None
    first: list[str] = []
    handles = [
        layer.register_forward_hook(_noting(name, first))
        for module in run.plain_modules()
        for name, layer in module.named_modules()
    ]
    buffers = [(b, b.clone()) for module in run.modules() for b in module.buffers()]
    try:
        with torch.no_grad():
            loss = loss_of(part)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    if not first and bool(loss.isfinite().all()):
        return None
    place = f"in shard {part.shard}, {part.num_samples} samples on rank {operator.world_rank},"
    layer = f", first in the output of {first[0]}" if first else ""
    return f"{place} the loss is {loss.item():.4g}{layer}"


def _noting(name: str, first: list[str]) -> Callable[..., None]:
    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else [output]
        for tensor in tensors:
            is_number = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            if is_number and not first and not bool(tensor.isfinite().all()):
                first.append(f"`{name}` ({type(module).__name__})" if name else "the model")

    return look
