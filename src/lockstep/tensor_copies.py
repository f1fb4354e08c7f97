# SPDX-License-Identifier: Apache-2.0
"""`TensorCopies`: copies of tensors of any layout, to restore them; and tensors as bytes.

Only this module knows which tensors are numbers in memory with strides (a block), and how the
others (sparse, quantized, nested, expanded, conjugated) are copied and written over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lockstep._torch_compat import copy_each

if TYPE_CHECKING:
    from collections.abc import Sequence


class TensorCopies:
    """Copies of the values that tensors had at the last `take`.

    The memory of the copies is used again by the next `take`, where it fits: memory fresh from the
    operating system is mapped page by page, which takes longer than the copy. No host waits for a
    device. The tensors themselves are not held: one may hang on the graph of a past step.

    Attributes:
        values: the copies, in the order of the tensors.
    """

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the values that `tensors` have now."""
        old = self.values if len(self.values) == len(tensors) else []
        memory = {n: old[n] for n in range(len(old)) if fits(tensors[n], old[n])}
        overwrite(list(memory.values()), [tensors[n] for n in memory])
        self.values = [
            memory[n] if n in memory else tensor.detach().clone()
            for n, tensor in enumerate(tensors)
        ]

    def restore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the copies over the tensors that were given to `take`.

        Not over detached ones: a detached sparse tensor has memory of its own.
        """
        overwrite(tensors, self.values)


class HostCopy:
    """A copy of a tensor in the host's memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._value = tensor.to("cpu", copy=True)

    def on_device(self) -> torch.Tensor:
        """The value, on the device that the tensor was on; on the host the copy itself."""
        return self._value.to(self._device)


def overwrite(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each of `values` into its counterpart in `targets`."""
    plain: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            if _is_plain(target):
                plain.append(target)
                theirs.append(value)
            else:
                write_into(target, value)
        if plain:
            copy_each(plain, theirs)


def write_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value` into `tensor`, whose elements may share memory (``expand``)."""
    if not is_block(tensor):
        # Not through `detach`: a detached sparse tensor has memory of its own.
        with torch.no_grad():
            tensor.copy_(value)
        return
    target = tensor.detach()
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


def fits(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether both are blocks of the same shape and dtype, so that one can hold the other."""
    are_blocks = is_block(value) and is_block(tensor)
    return are_blocks and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)


def is_block(tensor: torch.Tensor) -> bool:
    """Whether the tensor consists of numbers in memory and strides, and nothing else."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def fresh_strides(block: torch.Tensor) -> tuple[int, ...]:
    """The strides of a fresh tensor like `block`, which are those of its gradient."""
    # Of a dimension of one element any stride is contiguous; to make a tensor takes longer.
    if block.is_contiguous() and min(block.shape, default=2) > 1:
        return block.stride()
    return torch.empty_like(block, device="meta").stride()


def is_shard(tensor: object) -> bool:
    """Whether a tensor is this rank's part of a whole one, and so another on each rank."""
    return type(tensor).__name__ == "DTensor"  # by name: its import takes long


def is_expanded(block: torch.Tensor) -> bool:
    """Whether several elements of the block share one number in memory."""
    return any(
        not stride and size > 1 for size, stride in zip(block.shape, block.stride(), strict=True)
    )


def as_bytes(block: torch.Tensor) -> torch.Tensor:
    """The numbers of a block one after the other, as bytes; a view where they lie like that."""
    plain = block.detach().resolve_conj().resolve_neg().contiguous()
    # Of a lone number any stride is contiguous.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether every element has its own number in this process's memory, stored as it is."""
    if is_shard(tensor) or not is_block(tensor) or tensor.is_conj() or tensor.is_neg():
        return False
    return not is_expanded(tensor)
