# SPDX-License-Identifier: Apache-2.0
"""`DDPWrapper`: a model in torch's DistributedDataParallel, whose buckets lockstep reduces.

DDP gives the wrapper, the flat buckets and the moment at which each is full; the transport is
ours, through DDP's communication hook. Its own process group is one of this rank alone, because
what it would send on a shared one follows forwards: the order of its rebuilt buckets at the
second forward, a map of used parameters after each backward. A rank without samples runs no
forward, and its peers would wait for it, or read its next message as that one.
"""

from __future__ import annotations

import copy
import zlib
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from lockstep._torch_compat import (
    ddp_kwargs_without_sync,
    forget_comm_hooks,
    freeze_ddp_buckets,
    group_of_one,
    ignore_in_ddp,
    make_reducer,
    with_parameters_reversed,
    zero_buckets,
)
from lockstep.errors import (
    ConfigurationError,
    GradientNotReducedError,
    NotAvailableError,
    SparseGradientError,
)
from lockstep.sync.local_parameters import is_local, named_local_tensors

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from lockstep.sync.buckets import Slot

_ALLOWED: Final = frozenset(
    {
        "broadcast_buffers",
        "forward_sync_buffers",
        "bucket_cap_mb",
        "bucket_cap_mb_list",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "batched_grad_copy",
    }
)
_OURS: Final = {
    "module": "it is what register(models=...) was given",
    "process_group": "the workers' group is used",
    "device_mesh": "the workers' group is used",
    "device_ids": "a worker has one device, and batches are moved to it",
    "output_device": "a worker has one device, and batches are moved to it",
    "init_sync": "the replicas have to start equal",
    "static_graph": "it lets torch guess how often a parameter is used; leave it out",
    "mixed_precision": 'write TorchTrainer(..., precision="bf16")',
}


class Carrier(Protocol):
    """Reduces a model's buckets: the part of the transport that the wrapper may use."""

    @property
    def is_paused(self) -> bool: ...
    def refuse_broken(self) -> None: ...
    def reduce_bucket(
        self, model: DDPWrapper, bucket: Any
    ) -> torch.futures.Future[torch.Tensor]: ...


def parse_ddp_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that DDP is made with.

    Raises:
        ConfigurationError: one that is not DDP's, or that cannot hold here.
    """
    for name, value in given.items():
        if name not in _ALLOWED:
            raise ConfigurationError(
                f"ddp_args cannot hold {name}",
                expected=f"some of {', '.join(sorted(_ALLOWED))}",
                got=f"{name}={value!r:.60}",
                cause=_OURS.get(name),
                fix=f"leave {name} out of register(ddp_args=...)",
            )
    return dict(given)


@with_parameters_reversed
class DDPWrapper(DistributedDataParallel):
    """torch's DDP around one module; `DDPTransport` makes and owns it.

    Attributes:
        place: its number among the models.
        slots: the synchronised parameters, frozen ones included.
        reduced: the parameters in DDP's buckets: they required a gradient when DDP made them.
        is_waiting: its reducer waits for the gradients of a forward.
        marked: the parameters that DDP's reducer will treat as used in its next reduction.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        place: int,
        slots: Sequence[Slot],
        carrier: Carrier,
        arguments: Mapping[str, Any],
    ) -> None:
        names = [name for name, _ in named_local_tensors(module)]
        if names:
            ignore_in_ddp(type(self), module, names)
        _refuse_sparse(module)
        kept = {"broadcast_buffers", "forward_sync_buffers"}
        super().__init__(
            module,
            process_group=group_of_one({slot.param.device.type for slot in slots} | {"cpu"}),
            **ddp_kwargs_without_sync(DistributedDataParallel),
            **{name: value for name, value in arguments.items() if name not in kept},
        )
        self.place = place
        self.slots = list(slots)
        self._carrier: Carrier | None = carrier
        self.is_waiting = False
        self._filled: dict[Slot, torch.Tensor] = {}
        self._set_up_reducer()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; with gradients, the buckets are made ready for its backward."""
        carrier = self._carrier
        if carrier is None or not torch.is_grad_enabled() or not self.trainable_slots():
            return self.module(*inputs, **kwargs)
        carrier.refuse_broken()
        if carrier.is_paused and self.is_waiting:
            # A forward whose backward did not come: its unused parameters count as done in the
            # reducer, and DDP fails in C++ where this forward, which it is not told of, uses them.
            self.forget()
        self.follow_frozen()
        self.require_backward_grad_sync = not carrier.is_paused
        self.is_waiting = self.is_waiting or not carrier.is_paused
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise GradientNotReducedError(
                "the last backward through this model left parameters without a gradient",
                cause="a conditional branch or an unused layer",
                fix='self.register(..., ddp_args={"find_unused_parameters": True})',
            ) from error

    def trainable_slots(self) -> list[Slot]:
        """The parameters that require a gradient now."""
        return [slot for slot in self.slots if slot.param.requires_grad]

    def follow_frozen(self) -> None:
        """Make new buckets if layers were frozen or unfrozen, as torch does when it unpickles."""
        if self.reduced == self.trainable_slots():
            return
        if not self.trainable_slots():
            self.forget()  # torch has no reducer without parameters
            return
        _refuse_sparse(self.module)  # unfrozen: DDP would fail in C++, in the middle of a backward
        make_reducer(self)
        self._set_up_reducer()

    def forget(self) -> None:
        """Make new buckets before the next forward, because a backward did not end."""
        self.reduced: list[Slot] = []

    def signature(self) -> int:
        """A number that tells which parameters of which model are in the buckets."""
        numbers = [slot.number for slot in self.reduced]
        return (zlib.crc32(repr(numbers).encode()) % 65536) * 64 + self.place

    def empty_buckets(self) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Zeros like every bucket, and the parameters whose gradients stand in it, in order."""
        for bucket in zero_buckets(self):
            yield bucket.buffer(), bucket.parameters()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        # A copy (an average of the weights, say) is no replica.
        copied: torch.nn.Module = copy.deepcopy(self.module, memo)
        return copied

    def release(self) -> None:
        """Take DDP's hooks off. The module can still be called, and trains by itself."""
        self._carrier = None
        forget_comm_hooks(self)
        self.logger = None
        self.reducer = None  # type: ignore[assignment]

    def _set_up_reducer(self) -> None:
        # DDP would rebuild its buckets in the order in which a rank's gradients came in its first
        # backward, which a rank without samples cannot know. So it is told one now.
        freeze_ddp_buckets(self)
        self.register_comm_hook(None, lambda state, bucket: self._reduce_bucket(bucket))
        self.reduced = self.trainable_slots()
        self.note_reduction()

    def note_reduction(self) -> None:
        """Note that the reducer has ended a reduction, or is new."""
        self.is_waiting = False
        self.marked: set[Slot] = set()

    def fill_marked(self) -> None:
        """Before a backward that reduces: put zeros where a gradient was dropped since it came.

        Torch's map of used parameters outlives the gradients of a window that was given up, or
        that the peers have reduced; DDP fails in C++ where one of them is not there.
        """
        for slot in self.marked:
            if slot.param.grad is None:
                slot.param.grad = self._filled[slot] = torch.zeros_like(slot.param)

    def clear_marked(self, arrived: Container[Slot]) -> None:
        """After a backward: remove the zeros of `fill_marked` where no gradient has arrived."""
        for slot, zeros in self._filled.items():
            if slot.param.grad is zeros and slot not in arrived:
                slot.param.grad = None
        self._filled.clear()

    def _reduce_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if self._carrier is None:
            raise NotAvailableError("this model was detached from its peers")
        return self._carrier.reduce_bucket(self, bucket)


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The gradients in a bucket of DDP's, strided like `parameters`; complex ones as real pairs."""
    offset = 0
    for parameter in parameters:
        real = _as_real(parameter.detach())
        piece = flat[offset : offset + real.numel()]
        offset += real.numel()
        strides = torch.empty_like(real, device="meta").stride()
        dense = strides == real.stride()
        yield piece.as_strided(real.shape, strides) if dense else piece.view(real.shape)


def write_to_view(view: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Copy a gradient into its view in a bucket; None is zeros."""
    view.zero_() if gradient is None else view.copy_(_as_real(gradient))


def copy_from_view(view: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient from its view in a bucket."""
    copied = view.clone()
    return torch.view_as_complex(copied) if parameter.is_complex() else copied


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _refuse_sparse(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        kind = isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if kind and child.sparse and child.weight.requires_grad and not is_local(child.weight):
            raise SparseGradientError(
                "a sparse gradient cannot travel in a flat bucket",
                got=f"`{name}.weight`" if name else "`weight`",
                fix="use sparse=False, or mark the layer: lockstep.local(layer)",
            )
