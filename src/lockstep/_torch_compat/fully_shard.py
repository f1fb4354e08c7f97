# SPDX-License-Identifier: Apache-2.0
"""What torch does not document of ``fully_shard`` (FSDP2), and of process groups written in Python.

Run on torch 2.13. Earlier versions lack one of `NEEDED_METHODS`, and are refused.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from lockstep._torch_compat import (
    disable_dynamo_at_first_call,
    parameters_of,
    storage_key,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

NEEDED_METHODS: Final = ("set_custom_all_gather", "reset_iter_state")
"""Public methods of `FSDPModule`, of which torch got the last with 2.13."""


_OPAQUE: Final = (nn.Module, type, ModuleType, str, bytes, int, float, complex, type(None))
"""Kinds of values in what a forward returns that bring no gradient to its backward."""

_MOST_DEEP: Final = 8
"""How many objects within each other, in what a forward returns, are searched for tensors."""

_COMPARED_FORWARDS: Final = 3
"""How many forwards of a unit are searched for writes through ``data``, which have no version."""


@dataclass(frozen=True)
class UnitCallbacks:
    """What a `ShardedUnit` calls, in the places where torch calls nobody.

    Attributes:
        before_forward: called before the unit's forward gathers its weights, which torch does
            without gradients: here they are on if those of the forward are.
        before_backward: called before the unit's backward gathers its weights.
        before_reduction: called before the unit reduces its gradients, with the unit and the
            parameters that got one; returns whether those without one are to be reduced, too, as
            zeros.
        refuse_write: called with a parameter to which the unit's forward has written: torch frees
            what was written, and the backward gathers the weights without it.
        refuse_replaced: called with a parameter that a module of the unit does not hold any more:
            torch puts it back.
    """

    before_forward: Callable[[], None]
    before_backward: Callable[[], None]
    before_reduction: Callable[[ShardedUnit, list[nn.Parameter]], bool]
    refuse_write: Callable[[nn.Parameter], None]
    refuse_replaced: Callable[[nn.Parameter], None]


class ShardedUnit:
    """One module to which ``fully_shard`` was applied: its parameters, gathered and freed together.

    Torch 2.13. No public interface tells when a unit's backward begins and ends, or which
    parameters got a gradient: ``set_reduce_scatter_unused_params`` sends zeros for the others,
    without saying so.

    Args:
        module: an `FSDPModule`.
        callbacks: what the unit calls.
    """

    def __init__(self, module: nn.Module, callbacks: UnitCallbacks) -> None:
        self._callbacks = callbacks
        self._state = _state_of(module)
        self._group = self._state._fsdp_param_group
        self._replaced: list[str] = []
        self._gathered: list[tuple[int, int]] = []
        self._forwards_to_compare = _COMPARED_FORWARDS
        self._data = self._data_now()
        if self._group is not None:
            self._replace("pre_forward", self._before_forward)
            self._replace("unshard", around=_outside_inference_mode)
            self._replace(
                "wait_for_unshard", around=_outside_inference_mode, then=self._note_gathered
            )
            self._replace("post_forward", self._after_forward)
            self._replace("pre_backward", self._before_backward)
            self._replace("post_backward", self._before_reduction)

    def _replace(
        self,
        name: str,
        ours: Callable[..., None] = lambda *_: None,
        then: Callable[[], None] = lambda: None,
        around: Callable[[Any], Any] = lambda function: function,
    ) -> None:
        """Call `ours` before torch's function of this name, with its arguments, `then` after it."""
        theirs = around(getattr(self._group, name))

        def both(*arguments: Any) -> Any:
            ours(*arguments)
            result = theirs(*arguments)
            then()
            return result

        setattr(self._group, name, disable_dynamo_at_first_call(both))
        self._replaced.append(name)

    def _before_forward(self, *_: Any) -> None:
        self._find_replaced()
        self._callbacks.before_forward()

    def _before_backward(self, *_: Any) -> None:
        self._find_replaced()
        self._callbacks.before_backward()

    def _after_forward(self, _: Any, __: Any, output: Any) -> None:
        self._find_writes()
        if torch.is_grad_enabled() and not isinstance(output, torch.Tensor):
            for hidden in _hidden_tensors(output):
                hidden.register_hook(self._state._pre_backward)

    def _find_replaced(self) -> None:
        if not self._group.is_sharded:
            return  # the modules hold what was gathered
        for held in self._group.fsdp_params:
            place = held._module_info
            holders = (place.module, *place.shared_modules)
            names = (place.param_name, *place.shared_param_names)
            if any(
                parameters_of(module).get(name) is not held.sharded_param
                for module, name in zip(holders, names, strict=True)
            ):
                self._callbacks.refuse_replaced(held.sharded_param)

    def _note_gathered(self) -> None:
        self._gathered = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        """Of each gathered parameter what a write to it, or an assignment to ``data``, changes."""
        held = [each._unsharded_param for each in self._group.fsdp_params]
        return [(version_of(param), storage_key(param)) for param in held]

    def _find_writes(self) -> None:
        compares = self._forwards_to_compare > 0
        if compares:
            self._forwards_to_compare -= 1
        for held, before, now in zip(
            self._group.fsdp_params, self._gathered, self._versions(), strict=True
        ):
            if before != now or (compares and not _has_rows(held)):
                self._callbacks.refuse_write(held.sharded_param)

    def _data_now(self) -> list[tuple[Any, weakref.ref[torch.Tensor]]]:
        """Of each parameter what an assignment to ``data`` changes, and its rows, which stay.

        The storage, which has no memory, and not its address: another one may get that.
        """
        held = [] if self._group is None else self._group.fsdp_params
        params = [each.sharded_param for each in held]
        return [(each.untyped_storage(), weakref.ref(rows_of_shard(each))) for each in params]

    def find_assigned(self) -> nn.Parameter | None:
        """A parameter to whose ``data`` a tensor was assigned since the last call."""
        before, self._data = self._data, self._data_now()
        for place, ((storage, rows), (storage_now, rows_now)) in enumerate(
            zip(before, self._data, strict=True)
        ):
            # A module that was moved or converted (`model.double()`) has other rows as well.
            if storage._cdata != storage_now._cdata and rows() is rows_now():
                found: nn.Parameter = self._group.fsdp_params[place].sharded_param
                return found
        return None

    def _leaves(self) -> list[tuple[Any, nn.Parameter]]:
        """Torch's records of the parameters that may get a gradient, and their leaves."""
        found = [
            (held, getattr(held, "_unsharded_param", None)) for held in self._group.fsdp_params
        ]
        return [(held, leaf) for held, leaf in found if leaf is not None and leaf.requires_grad]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What stands for the parameters in graphs, since the first forward."""
        return [leaf for _, leaf in self.leaf_of_each]

    @property
    def leaf_of_each(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter that may get a gradient, with its leaf, since the first forward."""
        found = [] if self._group is None else self._leaves()
        return [(held.sharded_param, leaf) for held, leaf in found]

    def _before_reduction(self, *_: Any) -> None:
        used: list[nn.Parameter] = []
        unused: list[nn.Parameter] = []
        for held, leaf in self._leaves():
            if leaf.grad is not None or held.unsharded_accumulated_grad is not None:
                used.append(held.sharded_param)
            else:
                unused.append(leaf)
        if self._callbacks.before_reduction(self, used):
            for leaf in unused:
                # Torch leaves it out of the message: gradients of different layers would be added
                # up where ranks have used different parameters.
                leaf.grad = torch.zeros_like(leaf)

    def scale_gradients(self, factor: float) -> None:
        """Multiply what the unit is about to reduce, for torch reduces nothing on one rank.

        Args:
            factor: 0 makes zeros of NaN, too.
        """
        for held, leaf in self._leaves():
            for gradient in (leaf.grad, held.unsharded_accumulated_grad):
                if gradient is not None:
                    if factor:
                        gradient.mul_(factor)
                    else:
                        gradient.zero_()

    @property
    def has_late_gradients(self) -> bool:
        """Whether gradients have come to the unit after it had reduced, or without its notice."""
        return any(
            leaf.grad is not None or held.unsharded_accumulated_grad is not None
            for held, leaf in ([] if self._group is None else self._leaves())
        )

    def reduce_late_gradients(self) -> None:
        """Reduce them as torch does at the end of a unit's backward."""
        state = self._group._training_state
        self._group.post_backward()
        self._group.finalize_backward()
        self._group._training_state = state

    def drop_gradients(self) -> None:
        """Drop what an aborted backward has left: torch would add it to the next one's."""
        for held in [] if self._group is None else self._group.fsdp_params:
            held.unsharded_accumulated_grad = None
            if (leaf := getattr(held, "_unsharded_param", None)) is not None:
                leaf.grad = None

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's rows of all parameters, as torch gathers them.

        Args:
            dtype: that of the message; ``uint8`` where torch packs parameters of several dtypes.
        """
        held = [each._sharded_param_data for each in self._group.fsdp_params]
        is_packed = dtype is torch.uint8
        return torch.cat([each.view(dtype) if is_packed else each.to(dtype) for each in held])

    def move_to(self, mesh: DeviceMesh) -> None:
        """Share the parameters out over another mesh: other rows, without values (zeros).

        The parameters stay the objects that they are, for optimizers and programs hold them.
        Torch 2.13 has no way to take ``fully_shard`` off a module, or to call it twice.
        """
        if self._group is None:
            return
        info = FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
        self._group.mesh_info = info
        if self._group.post_forward_mesh_info is not None:
            self._group.post_forward_mesh_info = info
        for held in self._group.fsdp_params:
            _share_out(held, info)
        self._data = self._data_now()  # assigned by this function

    def release(self) -> None:
        """Give torch its own functions back."""
        for name in self._replaced:
            vars(self._group).pop(name, None)


def _outside_inference_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose tensors can train: torch gathers all later weights into the first ones."""

    def call(*arguments: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*arguments)
        with torch.inference_mode(False), torch.no_grad():
            return function(*arguments)

    return call


def _hidden_tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors with a graph that a forward returns in objects into which torch does not look.

    Those of a ``torch.distributions.Normal``, say: without a hook on them a backward that comes
    through them reads weights that are freed.
    """
    seen: dict[int, Any] = {}  # the values, too: another one may get the id of one that is gone
    waiting = [(output, 0)]  # and how many objects it is within
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or isinstance(value, _OPAQUE) or depth > _MOST_DEEP:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if depth and value.grad_fn is not None:
                yield value
        elif (children := _children(value)) is not None:
            waiting += [(child, depth + bool(depth)) for child in children]
        else:
            waiting += [(child, depth + 1) for child in _attributes(value)]


def _children(value: Any) -> Iterable[Any] | None:
    """What torch finds in a container; None for what is none to it."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    fields = getattr(type(value), "__dataclass_fields__", None)
    return None if fields is None else [getattr(value, name, None) for name in fields]


def _attributes(value: Any) -> Iterable[Any]:
    return value if isinstance(value, set | frozenset) else getattr(value, "__dict__", {}).values()


def _has_rows(held: Any) -> bool:
    """Whether this rank's rows of a gathered parameter are those of its shard; it may have none."""
    place, num_ranks = held.mesh_info.shard_mesh_rank, held.mesh_info.shard_mesh_size
    gathered = held._unsharded_param.detach().chunk(num_ranks)
    own = rows_of_shard(held.sharded_param)
    return place >= len(gathered) or torch.allclose(
        gathered[place], own.to(gathered[place].dtype), rtol=0.0, atol=0.0, equal_nan=True
    )


def _share_out(held: Any, info: FSDPMeshInfo) -> None:
    """Give torch's record of a parameter the rows that this rank has in another mesh."""
    param: Any = held.sharded_param
    if held.post_forward_mesh_info is not None:
        held.post_forward_mesh_info = info
    # Without memory: torch cuts it up, and knows sizes and padding from then on.
    whole = torch.empty(held._orig_size, dtype=param.dtype, device="meta")
    held._init_sharded_param(whole, held.device, None, info)
    spec, num_rows = held.sharded_param._spec, held.sharded_param._local_tensor.shape[0]
    padded = torch.zeros(held.padded_sharded_param_size, dtype=param.dtype, device=held.device)
    held._sharded_param_data = padded.view(-1)
    param._local_tensor, param._spec, param.grad = padded.narrow(0, 0, num_rows), spec, None
    held.sharded_param = param
    held._setattr_on_modules(param)
    held.all_gather_outputs = []  # of another size
    held.unsharded_accumulated_grad = None
    if hasattr(held, "_unsharded_param"):
        del held._unsharded_param


def _state_of(module: nn.Module) -> Any:
    return getattr(module, "_get_fsdp_state")()  # noqa: B009


def begin_as_root(module: nn.Module) -> None:
    """Let a sharded module be the root of those below, as torch does at its first forward.

    Torch takes the dtypes of a unit's gradients from its parameters that train by then. Others may
    be unfrozen later; all of a unit have the same dtype.
    """
    state = _state_of(module)
    state._lazy_init()
    for each in state._state_ctx.all_states:
        group = each._fsdp_param_group
        if group is not None and group.fsdp_params and group._orig_dtype is None:
            first = group.fsdp_params[0]
            group._orig_dtype, group._reduce_dtype = first.orig_dtype, first.reduce_dtype


def is_aborted(root: nn.Module) -> bool:
    """Whether a forward or a backward of a sharded model has ended in the middle."""
    context = _state_of(root)._state_ctx
    states = {str(state._training_state) for state in context.all_states}
    return context.post_backward_final_callback_queued or any("IDLE" not in s for s in states)


def forget_aborted_step(root: nn.Module) -> None:
    """After a forward or backward of a sharded model that raised: free what it had gathered."""
    free: Any = root
    free.reset_iter_state()


def rows_of_shard(shard: Any) -> torch.Tensor:
    """This rank's rows of a ``DTensor``: the same tensor each time, unlike that of ``to_local``.

    Torch 2.13.
    """
    rows: torch.Tensor = shard._local_tensor
    return rows


def divide_rows(shards: Iterable[Any], divisor: float) -> None:
    """Divide this rank's rows of ``DTensor``s, in one call: each ``to_local`` takes longer.

    Torch 2.13 (``_foreach_div_``).
    """
    torch._foreach_div_([rows_of_shard(shard) for shard in shards], divisor)


def finished_work(result: Any) -> Any:
    """The ``Work`` of a collective that is done; `result`: a tensor or a list. Torch 2.13."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    make: Any = getattr(_distributed_c10d, "_create_work_from_future")  # noqa: B009
    return make(future)


COLLECTIVES: Final = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
)
"""The methods of a process group in which ranks meet: those that torch 2.13 calls from outside of a
group that is written in Python."""
