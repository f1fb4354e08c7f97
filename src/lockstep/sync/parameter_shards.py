# SPDX-License-Identifier: Apache-2.0
"""This rank's rows of parameters that every rank holds whole, and of what belongs to them.

A shard is a view: what is written to it is written to the rank's own rows of the whole. It is a
`DTensor`, because to an optimizer it has to be the whole parameter: its shape and, through
DTensor's collectives, its norm are the whole one's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor, Shard

from lockstep._torch_compat import storage_key, version_of
from lockstep.errors import NotAvailableError
from lockstep.sync.buffers import broadcast_tensors
from lockstep.sync.local_parameters import is_local, local

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.group import Group


def has_rows(param: torch.Tensor) -> bool:
    """Whether there is something to share out, and gloo and torch can carry it."""
    return not is_local(param) and param.dim() > 0 and param.numel() > 0 and not param.is_complex()


def rows_of(whole: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """The rows of a tensor that `rank` keeps; maybe none."""
    height = -(-whole.shape[0] // num_ranks)
    first = min(rank * height, whole.shape[0])
    return whole[first : first + height]


def sharded(local_rows: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """`local_rows` as this rank's part of what is shaped like `whole`. Communicates nothing."""
    return DTensor.from_local(
        local_rows,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def own_copy(value: torch.Tensor, param: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of `value`, where `param` is."""
    rows = rows_of(value.detach(), mesh.get_local_rank(), mesh.size())
    return sharded(rows.to(param.device, copy=True), value, mesh)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which this may be a shard.

    Gradient:
        Back to the shard, as `DTensor.full_tensor` has it.

    Collective:
        Every rank of a shard's mesh. One all-gather; none for a tensor that is no shard.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state_in_shards(
    state: Mapping[str, Any], param: torch.Tensor, mesh: DeviceMesh
) -> dict[str, Any]:
    """What an optimizer remembers of `param`, with this rank's rows of what has its shape."""
    return {
        name: own_copy(value, param, mesh)
        if isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and value.shape == param.shape
        else value
        for name, value in state.items()
    }


class ShardOfParameter:
    """A parameter as an optimizer sees it while it steps.

    Attributes:
        number: its place among the parameters, the same on every rank.
        whole: the parameter itself, which stays with its module.
        param: this rank's rows of it.
    """

    def __init__(self, number: int, whole: torch.Tensor, mesh: DeviceMesh) -> None:
        self.number = number
        self.whole = whole
        self._mesh = mesh
        self._rank, self._num_ranks = mesh.get_local_rank(), mesh.size()
        self._lent: tuple[torch.Tensor | None, int] = None, 0
        self._build()

    def _build(self) -> None:
        self._place = self._place_now()
        rows = rows_of(self.whole.detach(), self._rank, self._num_ranks)
        self.param = torch.nn.Parameter(
            sharded(rows, self.whole, self._mesh), requires_grad=self.whole.requires_grad
        )
        self._storage = storage_key(self.param)

    def _place_now(self) -> tuple[Any, ...]:
        whole = self.whole
        return whole.data_ptr(), whole.device, whole.dtype, whole.shape, whole.stride()

    def lend(self) -> torch.nn.Parameter:
        """What the optimizer steps, with the gradient that the whole parameter has now.

        Gradient:
            A copy of the rank's rows. An optimizer may write to it through ``.data``, which
            nobody sees: the whole gradient would then be another one on each rank.
        """
        if self._place != self._place_now():
            self._build()  # `param.data = other`, or a model that moved to another device
        grad: torch.Tensor | None = None
        if self.whole.grad is not None:
            rows = rows_of(self.whole.grad.detach(), self._rank, self._num_ranks)
            grad = sharded(rows.clone(), self.whole.grad, self._mesh)
        # Marks of the user's own, by which an optimizer may choose.
        vars(self.param).update(vars(self.whole))
        local(self.param)
        self.param.requires_grad_(self.whole.requires_grad)
        self.param.grad = grad
        self._lent = grad, self._version()
        return self.param

    def _version(self) -> int:
        grad = self.param.grad
        return version_of(self.param) + (0 if grad is None else version_of(grad))

    def take_back(self) -> list[torch.Tensor]:
        """The step is over: what was done to the gradient is done to the whole one.

        Returns:
            Of which whole tensors only this rank's rows are those of now. It follows from what
            the ranks do alike, whether or not they have rows of it.
        """
        grad, version = self._lent
        now, changed = self.param.grad, self._version() != version
        self._lent, self.param.grad = (None, 0), None
        # Without a gradient an optimizer leaves a parameter alone; a decay may not.
        found = [self.whole] if grad is not None or self.whole.requires_grad or changed else []
        if now is None:
            self.whole.grad = None
        elif now is not grad or changed:
            if self.whole.grad is None:
                self.whole.grad = torch.zeros_like(self.whole)
            part = cast("DTensor", now).redistribute(self._mesh, [Shard(0)]).to_local()
            rows_of(self.whole.grad, self._rank, self._num_ranks).copy_(part)
            found.append(self.whole.grad)
        return found

    def check(self) -> None:
        """Raise if the shard's values are not the parameter's any more.

        Raises:
            NotAvailableError: the optimizer assigned to ``.data``, of which a DTensor takes no
                notice.
        """
        if storage_key(self.param) != self._storage:
            self._build()
            raise NotAvailableError(
                'this optimizer cannot step under sync="fsdp"',
                got=f"it assigned to `.data` of a parameter of shape {tuple(self.whole.shape)}",
                cause="what it steps is a shard, whose values do not follow such an assignment",
                fix='write `param.copy_(...)` in the optimizer, or sync="replicate"',
            )


def gather_rows(group: Group, tensors: Sequence[torch.Tensor], *, cap_bytes: int) -> None:
    """Overwrite the other ranks' rows of whole `tensors` with what those ranks have.

    Rejected: an all-gather. It needs memory for what it gathers, and on gloo as much again, which
    was more than the optimizer's state that sharding saves; on two CPUs it was no quicker.

    Args:
        group: the ranks.
        tensors: of the same shapes, dtypes and order on every rank.
        cap_bytes: the most that is packed into one message.

    Gradient:
        None: runs without recording.

    Collective:
        Every rank. Blocks. From each rank one broadcast per large tensor, and per device and
        `cap_bytes`.

    Raises:
        PeerLostError: another rank went away.
    """
    for source in range(group.size):
        rows = [rows_of(tensor.detach(), source, group.size) for tensor in tensors]
        broadcast_tensors(group, rows, cap_bytes=cap_bytes, source=source)
