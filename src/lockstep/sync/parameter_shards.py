# SPDX-License-Identifier: Apache-2.0
"""`ParameterShards`: this rank's rows of whole parameters, and of the state of optimizers.

A shard is a view: a write to it is a write to this rank's rows of the whole parameter. It is a
`DTensor`, because to an optimizer it has to be the whole parameter: its shape and, through
DTensor's collectives, its norm are those of the whole one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lockstep._torch_compat import storage_key, version_of
from lockstep._torch_compat.device_mesh import forget_groups
from lockstep.errors import CheckpointError, NotAvailableError
from lockstep.local_rows import LocalRows, first_row, rows_of
from lockstep.sync.local_parameters import is_local, local
from lockstep.tensor_tree import children_of, rebuild_container, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from lockstep.sync.buckets import Slot


def can_be_sharded(param: torch.Tensor) -> bool:
    """Whether `param` has rows to share out, of a dtype that gloo and DTensor can carry."""
    return not is_local(param) and param.dim() > 0 and param.numel() > 0 and not param.is_complex()


def as_shard(local_rows: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """`local_rows` as this rank's shard of a tensor shaped like `whole`. Communicates nothing."""
    return DTensor.from_local(
        local_rows,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def shard_like(whole: torch.Tensor | LocalRows, shard: DTensor) -> DTensor:
    """This rank's rows of a whole tensor, on the mesh and the device of `shard`.

    The dtype is that of the whole tensor: an optimizer's state may have another one than its
    parameter. A shard itself stays as it is.
    """
    if isinstance(whole, DTensor):
        return whole
    mesh = shard.device_mesh
    if isinstance(whole, LocalRows):
        _refuse_rows_of_another(whole, mesh)
        return as_shard(whole.rows.to(shard.device), _like(whole), mesh)
    rows = rows_of(whole.detach(), mesh.get_local_rank(), mesh.size())
    return as_shard(rows.to(shard.device, copy=True), whole.contiguous(), mesh)


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the whole tensor of which `tensor` is a shard; `tensor` itself if it is none.

    Gradient:
        Back to the shard, as `DTensor.full_tensor` has it.

    Collective:
        Every rank of a shard's mesh. One all-gather; none for a tensor that is no shard.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows_of_state(
    state: dict[str, Any],
    shape: torch.Size,
    shard: Callable[[Any], DTensor],
    kinds: tuple[type, ...] = (torch.Tensor, LocalRows),
) -> dict[str, Any]:
    """An optimizer's state of one parameter, with this rank's rows, also in lists and dicts.

    Args:
        shape: of the whole parameter. A whole tensor of another shape stays whole.
        shard: makes a shard of `LocalRows`, or of a whole tensor.
        kinds: what becomes a shard; anything else stays as it is.
    """

    def own_rows(leaf: Any) -> Any:
        if isinstance(leaf, DTensor) or not isinstance(leaf, kinds):
            return leaf
        is_own = isinstance(leaf, LocalRows) or getattr(leaf, "shape", None) == shape
        return shard(leaf) if is_own else leaf

    return _map_values(own_rows, state)


def cut_states_by_rows(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Let each rank have its rows of what an optimizer keeps of shards, and whole numbers.

    A step may leave something else: of a norm, or a sum, each rank's part, whose reduction DTensor
    leaves to the next operation; of a transposed gradient, columns; of a mean over rows, all of it.
    A checkpoint, and a copy for a partner, has rows.

    Args:
        parameters: those that the optimizer has stepped, in the same order on every rank.

    Gradient:
        None: of states alone.

    Collective:
        Every rank of the shards' mesh, after the same step. One all-reduce for each part of a
        number, one exchange for each tensor that is not there by rows.
    """
    # Asked first: hardly an optimizer has one, and this is looked up in every step.
    if not any(map(_holds_others, optimizer.state.values())):
        return
    known = dict.fromkeys(param for param in parameters if param in optimizer.state)
    for key in [*known, *(key for key in optimizer.state if key not in known)]:
        held = optimizer.state[key]
        if isinstance(held, dict):
            held.update(_map_values(_by_rows, held))
        else:
            optimizer.state[key] = tree_map(_by_rows, held, _rebuild_changed)


def _holds_others(value: Any) -> bool:
    """Whether a state has something that is neither there by rows nor a whole number."""
    if isinstance(value, DTensor):
        return list(value.placements) != _placements_by_rows(value)
    if isinstance(value, torch.Tensor):
        return False
    children = value.values() if type(value) is dict else (c for _, c in children_of(value) or ())
    return any(map(_holds_others, children))


def _placements_by_rows(tensor: DTensor) -> list[Placement]:
    placement = Shard(0) if tensor.dim() else Replicate()
    return [placement for _ in tensor.placements]


def _by_rows(leaf: Any) -> Any:
    if not isinstance(leaf, DTensor) or not _holds_others(leaf):
        return leaf
    return leaf.redistribute(placements=_placements_by_rows(leaf))


def _map_values(function: Callable[[Any], Any], state: dict[str, Any]) -> dict[str, Any]:
    return {name: tree_map(function, each, _rebuild_changed) for name, each in state.items()}


def _rebuild_changed(like: Any, values: list[Any]) -> Any:
    """A container around `values`; the same object if they are those that it has.

    An optimizer may hold a list of its state elsewhere as well.
    """
    children = [child for _, child in children_of(like) or []]
    is_same = all(old is new for old, new in zip(children, values, strict=True))
    return like if is_same else rebuild_container(like, values)


def _refuse_rows_of_another(rows: LocalRows, mesh: DeviceMesh) -> None:
    """Refuse rows that another rank has, or that this rank had among other ranks.

    Raises:
        CheckpointError: they are.
    """
    length, rank, size = rows.shape[0], mesh.get_local_rank(), mesh.size()
    first, end = first_row(length, rank, size), first_row(length, rank + 1, size)
    if (rows.first, len(rows.rows)) != (first, end - first):
        raise CheckpointError(
            "the state has the rows of another rank",
            where=f"rank {rank} of {size}",
            expected=f"rows {first} to {end} of {length}",
            got=f"rows {rows.first} to {rows.first + len(rows.rows)}",
            cause="the group has formed anew since the state was taken or read",
            fix="load it again",
        )


def _like(rows: LocalRows) -> torch.Tensor:
    """A tensor of the whole's shape and dtype, without memory."""
    return torch.empty(rows.shape, dtype=rows.rows.dtype, device="meta")


class ParameterShards:
    """The shards of some parameters over the ranks of a mesh; each is made when it is asked for.

    Scalars, complex and local parameters have none: every rank steps them whole.
    """

    def __init__(self, slots: Iterable[Slot], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._numbers = {slot.param: slot.number for slot in slots if can_be_sharded(slot.param)}
        self._shards: dict[torch.Tensor, ParameterShard] = {}

    def shard_of(self, param: torch.Tensor) -> ParameterShard | None:
        """The shard of `param`; None for one that stays whole."""
        if param not in self._shards and param in self._numbers:
            self._shards[param] = ParameterShard(self._numbers[param], param, self._mesh)
        return self._shards.get(param)

    def shard_state(
        self,
        state: dict[str, Any],
        param: torch.Tensor,
        kinds: tuple[type, ...] = (torch.Tensor, LocalRows),
    ) -> dict[str, Any]:
        """See `own_rows_of_state`; the state of a parameter that stays whole is unchanged."""
        if param not in self._numbers:
            return state
        shard = partial(self._shard_of_copy, param=param)
        return own_rows_of_state(state, param.shape, shard, kinds)

    def _shard_of_copy(self, value: torch.Tensor | LocalRows, param: torch.Tensor) -> DTensor:
        if isinstance(value, LocalRows):
            _refuse_rows_of_another(value, self._mesh)
            return as_shard(value.rows.to(param.device), _like(value), self._mesh)
        rows = rows_of(value.detach(), self._mesh.get_local_rank(), self._mesh.size())
        return as_shard(rows.to(param.device, copy=True), value, self._mesh)

    def close(self) -> None:
        """Drop the shards, and the process group of the mesh."""
        self._numbers.clear()
        self._shards.clear()
        # The optimizers' states keep the mesh, and a mesh keeps its groups by name.
        forget_groups(self._mesh)


class ParameterShard:
    """One parameter's shard, which an optimizer steps in the place of the parameter.

    Attributes:
        number: its place among the parameters, the same on every rank.
        whole: the parameter itself, which stays with its module.
        param: this rank's rows of it, a parameter too.
    """

    def __init__(self, number: int, whole: torch.Tensor, mesh: DeviceMesh) -> None:
        self.number = number
        self.whole = whole
        self._mesh = mesh
        self._rank, self._num_ranks = mesh.get_local_rank(), mesh.size()
        self._given: tuple[torch.Tensor | None, int] = None, 0
        self._build()

    def _build(self) -> None:
        self._place = self._place_now()
        rows = rows_of(self.whole.detach(), self._rank, self._num_ranks)
        self.param = torch.nn.Parameter(
            as_shard(rows, self.whole, self._mesh), requires_grad=self.whole.requires_grad
        )
        self._storage = storage_key(self.param)

    def _place_now(self) -> tuple[Any, ...]:
        whole = self.whole
        return whole.data_ptr(), whole.device, whole.dtype, whole.shape, whole.stride()

    def begin_step(self) -> None:
        """Give the shard the gradient, and the marks, that the whole parameter has now.

        Gradient:
            A copy of this rank's rows. An optimizer may write to it through ``.data``, which no
            version counter shows: the whole gradient would then be another one on each rank.
        """
        if self._place != self._place_now():
            self._build()  # `param.data = other`, or a model that moved to another device
        grad: torch.Tensor | None = None
        if self.whole.grad is not None:
            rows = rows_of(self.whole.grad.detach(), self._rank, self._num_ranks)
            grad = as_shard(rows.clone(), self.whole.grad, self._mesh)
        # The user's own attributes, by which an optimizer may choose among parameters.
        vars(self.param).update(vars(self.whole))
        local(self.param)
        self.param.requires_grad_(self.whole.requires_grad)
        self.param.grad = grad
        self._given = grad, self._version()

    def _version(self) -> int:
        grad = self.param.grad
        return version_of(self.param) + (0 if grad is None else version_of(grad))

    def end_step(self) -> list[torch.Tensor]:
        """Copy the changes that the optimizer made to the shard's gradient to the whole one.

        Returns:
            The whole tensors of which only this rank's rows are up to date. The same on every
            rank, also on one that has no rows of this parameter.
        """
        grad, version = self._given
        now, changed = self.param.grad, self._version() != version
        self._given, self.param.grad = (None, 0), None
        # An optimizer skips a parameter without a gradient, but weight decay may change it.
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
