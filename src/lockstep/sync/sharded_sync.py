# SPDX-License-Identifier: Apache-2.0
"""`ShardedSync`: weights, gradients and optimizers' states in shards; one unit at a time is whole.

torch's ``fully_shard`` gathers and frees; `ShardedTransport` says what the gradients are.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lockstep._torch_compat import (
    parameters_of,
    post_accumulate_grad_hooks,
    set_post_accumulate_grad_hooks,
    set_tensor_hooks,
    tensor_hooks,
)
from lockstep._torch_compat.backward_inputs import choose_inputs
from lockstep._torch_compat.device_mesh import make_mesh
from lockstep._torch_compat.fully_shard import NEEDED_METHODS, begin_as_root, rows_of_shard
from lockstep._torch_compat.shard_operations import (
    reduce_empty_shards,
    reduce_scalars_when_read,
    refuse_draws,
)
from lockstep.compiler_disable import disable_dynamo
from lockstep.data_parallel_mesh import DataParallelMesh
from lockstep.errors import NotAvailableError
from lockstep.sync import replaced_parameters
from lockstep.sync.fsdp import require_default_group
from lockstep.sync.gradient_sync import GradientSync
from lockstep.sync.local_parameters import is_local
from lockstep.sync.mesh_collectives import MeshCollectives
from lockstep.sync.meta_device import (
    ReusedMemory,
    initialise_parameters,
    is_on_meta,
    prepare,
    reset_buffers,
)
from lockstep.sync.optimizer_inspection import inner_optimizers
from lockstep.sync.ordered_process_group import OrderedProcessGroup, make_ordered_group
from lockstep.sync.parameter_references import by_object, replace_in_attributes
from lockstep.sync.parameter_shards import cut_states_by_rows, own_rows_of_state, shard_like
from lockstep.sync.replica_checks import compare_values
from lockstep.sync.shard_units import (
    find_units,
    refuse_models,
    refuse_sparse,
    refuse_unmatched,
    refuse_unshardable,
)
from lockstep.sync.sharded_transport import ShardedTransport
from lockstep.sync.tensor_broadcast import broadcast_tensors
from lockstep.sync.unit_order import UnitOrder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from lockstep.group import Group
    from lockstep.sync.buckets import Slot
    from lockstep.sync.shard_units import ShardPolicy
    from lockstep.sync.transport_protocol import RoundController


class ShardedSync(GradientSync):
    """See `GradientSync`; the modules' parameters become `DTensor`s, of which a rank has its rows.

    Args:
        modules: each becomes an `FSDPModule`, in place: class and parameters change.
        group: the ranks; its process group has to be torch's default group.
        optimizers: hold the sharded parameters afterwards, and of their states this rank's rows; so
            do optimizers within them.
        shard: which submodules are units, see `lockstep.sync.shard_units`.
        mp_policy: torch's, for all units; None for none.
        dp_shard_size: over how many ranks a copy of the models is sharded; None for all.
        device: where parameters on the ``meta`` device get their memory, a unit at a time.

    Attributes:
        units: their names, those of the roots last; the same on every rank.
    """

    communicates_in_forward = True

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        group: Group,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        shard: ShardPolicy = "auto",
        mp_policy: MixedPrecisionPolicy | None = None,
        dp_shard_size: int | None = None,
        device: torch.device | None = None,
        buffers: str = "after_backward",
        averages: bool = True,
        broadcast: bool = True,
    ) -> None:
        if not all(hasattr(FSDPModule, name) for name in NEEDED_METHODS):
            raise NotAvailableError(
                "this version of torch lacks what a model in units needs",
                got=f"torch {torch.__version__}",
                fix='torch 2.13 or newer, or register(shard="whole")',
            )
        self._roots = [m for m in modules if any(not is_local(p) for p in m.parameters())]
        refuse_models(self._roots)
        refuse_sparse(self._roots)
        refuse_unmatched(self._roots, shard)
        members = [each for one in optimizers for each in (one, *inner_optimizers(one))]
        self._optimizers = list(dict.fromkeys(members))
        self._units: dict[str, torch.nn.Module] = {}
        self._units_of: dict[torch.nn.Module, list[torch.nn.Module]] = {}
        for place, root in enumerate(self._roots):
            prefix = f"{place}." if len(self._roots) > 1 else ""
            units = find_units(root, shard)
            refuse_unshardable(root, units)
            self._units_of[root] = [*units.values(), root]
            self._units |= {f"{prefix}{name}": unit for name, unit in units.items()}
            self._units[prefix.rstrip(".") or "model"] = root
        self.units = tuple(self._units)
        self._hooks: list[RemovableHandle] = []
        self._connected = ExitStack()
        self._mp_policy = mp_policy or MixedPrecisionPolicy()
        self._dp_shard_size = dp_shard_size
        self._broadcasts = broadcast
        first = next(param for root in self._roots for param in root.parameters())
        self._device = device or (group.device if first.is_meta else first.device)
        # Values come later, in the order of one worker: model by model.
        self._without_values = {
            module: prepare(module, self._device) if is_on_meta(module) else []
            for module in modules
        }
        self._order = UnitOrder(group, self.units)
        self._ordered: OrderedProcessGroup | None = None
        self._collectives = self._collectives_of(group)
        self._transport: ShardedTransport | None = None
        super().__init__(
            modules,
            group,
            buffers=buffers,
            averages=averages,
            broadcast=False,  # each unit before it is cut into shards
            make_transport=self._make_transport,
            settings={
                "units": list(self.units),
                "mp_policy": repr(self._mp_policy),
                "dp_shard_size": dp_shard_size,
            },
        )

    def _prepare(self, group: Group) -> None:
        """Cut the parameters into shards, and hand those to the optimizers."""
        try:
            mesh = self._connect(group)
            self._cut_up(mesh, group)
            if self._broadcasts:
                self._buffers.broadcast(group, cap_bytes=self._cap_bytes)
        except BaseException:
            self._disconnect()
            raise

    def _connect(self, group: Group) -> DeviceMesh:
        """The mesh of `group`, over which the ranks compare what they are about to do.

        Collective:
            Every rank: torch registers the mesh's group.
        """
        require_default_group(group)
        self._order.group = group
        self._order.agree_on_number()
        self._collectives = self._collectives_of(group)
        self._ordered = make_ordered_group(self._order, self._collectives)
        group.watch(self._order.before_other_collective)
        self._connected.enter_context(reduce_scalars_when_read())
        self._connected.enter_context(reduce_empty_shards())
        self._connected.enter_context(refuse_draws(_draw_error))
        self._connected.enter_context(choose_inputs(self._choose_inputs))
        return make_mesh(self._ordered, self._device.type)

    def _choose_inputs(self, outputs: Any, inputs: Any, *, accumulates: bool) -> Any:
        if self._transport is None:
            return inputs
        return self._transport.choose_inputs(outputs, inputs, accumulates=accumulates)

    def _collectives_of(self, group: Group) -> MeshCollectives:
        return MeshCollectives(group, DataParallelMesh(group.rank, group.size, self._dp_shard_size))

    def _disconnect(self) -> None:
        self._connected.close()
        if self._ordered is not None:
            self._ordered.close()

    def _cut_up(self, mesh: DeviceMesh, group: Group) -> None:
        places = list(_places(self._roots))
        own = {param for _, _, param in places if is_local(param)}
        self._shard_units(mesh, group, own)
        for root in self._roots:
            begin_as_root(root)  # also if the first call is one of a unit
        sharded = {id(old): parameters_of(owner)[key] for owner, key, old in places}
        found = self._found.parameters
        before = dict(found)
        found.update({name: _parameter(sharded[id(old)]) for name, old in found.items()})
        for owner, key, old in places:
            _keep_marks(old, parameters_of(owner)[key])
        # Not traced: a compiled step would guard on the whole state.
        after_step = disable_dynamo(lambda stepped, *_: cut_states_by_rows(stepped, found.values()))
        for optimizer in self._optimizers:
            _hand_over(optimizer, sharded)
            self._hooks += [
                optimizer.register_load_state_dict_pre_hook(_with_own_rows),
                optimizer.register_step_post_hook(after_step),
            ]
        for name, old in before.items():
            replaced_parameters.replace(_parameter(old), found[name], name)

    def _shard_units(self, mesh: DeviceMesh, group: Group, own: set[Any]) -> None:
        """Give each unit the values that it has on rank 0, and cut it up before the next one."""
        memory = ReusedMemory(self._units.values(), self._device)
        for model, without_values in self._without_values.items():
            reset_buffers(without_values)
            if model not in self._units_of:
                initialise_parameters(model, self._device)  # nothing of it is cut up
            for unit in self._units_of.get(model, []):
                filled = self._give_values(unit, group, memory)
                # Roots come after their units: torch shards what is not sharded yet. They are
                # freed after a forward as well: until a backward `model.parameters()` would be
                # whole tensors, of which a clip or `model.zero_grad()` says nothing to those that
                # optimizers hold.
                fully_shard(
                    unit,
                    mesh=mesh,
                    ignored_params=own,
                    reshard_after_forward=True,
                    mp_policy=self._mp_policy,
                )
                for param in filled:
                    if not is_local(param):
                        # A list of parameters from before must not show values of the next unit.
                        replaced_parameters.free(param)
                memory.free()
        self._without_values.clear()

    def _give_values(
        self, module: torch.nn.Module, group: Group, memory: ReusedMemory
    ) -> list[torch.nn.Parameter]:
        """Give what is still whole of a unit the values that it has on rank 0.

        Collective:
            Every rank: broadcasts.

        Returns:
            The parameters that had no memory before.
        """
        filled = initialise_parameters(module, self._device, memory)
        whole = [param for param in module.parameters() if not isinstance(param, DTensor)]
        if self._broadcasts:
            synced = [param for param in whole if not is_local(param)]
            broadcast_tensors(group, synced, cap_bytes=self._cap_bytes)
        return filled

    def _make_transport(
        self, controller: RoundController, slots: Sequence[Slot], signature: int, cap_bytes: int
    ) -> ShardedTransport:
        self._order.step = lambda: controller.step
        self._transport = ShardedTransport(
            controller,
            slots,
            signature,
            units=self._units,
            roots=self._roots,
            order=self._order,
            collectives=self._collectives,
        )
        return self._transport

    def begin_step(self, step: int) -> None:
        """See `GradientSync.begin_step`; what a forward that raised has gathered is freed.

        Gradient:
            As `GradientSync.begin_step`.

        Collective:
            None.
        """
        super().begin_step(step)
        if self._transport is not None:
            self._transport.refuse_assigned_data()
            if self._transport.was_aborted:
                self._transport.forget_aborted_step()

    def detach(self) -> None:
        """See `GradientSync.detach`; models and optimizers stay in shards, as torch has them."""
        super().detach()
        self._disconnect()
        self._order.step = lambda: 0  # it held the rounds, and so the model
        self._order.take_part = lambda _: None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def leave_group(self) -> bool:
        """See `GradientSync.leave_group`; nothing holds the group's sockets open any more.

        Gradient:
            None.

        Collective:
            None.
        """
        can_join = super().leave_group()
        self._disconnect()
        return can_join

    def join_group(self, group: Group) -> None:
        """See `GradientSync.join_group`; each rank gets its rows in `group`, without values.

        Parameters stay the same objects. The caller loads their values, and the optimizers'.

        Gradient:
            None: gradients are dropped.

        Collective:
            Every rank of `group`. Two small all-gathers, and those of a new mesh.

        Raises:
            ReplicasDifferError: the ranks' models differ.
        """
        super().join_group(group)
        assert self._transport is not None, "made with the sync"
        mesh = self._connect(group)
        self._transport.move_to(mesh, self._collectives)

    def agree_on_values(self) -> None:
        """See `GradientSync.agree_on_values`: several copies are compared, each rank's rows alone.

        Gradient:
            None: metadata only.

        Collective:
            Every rank, if there are several copies. Two small all-gathers.

        Raises:
            ReplicasDifferError: on every rank; names the parameters and the ranks.
        """
        mesh = self._collectives.mesh
        if mesh.replicate_size > 1:
            rows = {slot.name: rows_of_shard(slot.param) for slot in self._rounds.slots}
            compare_values(
                self._rounds.attached_group(),
                rows,
                have_stepped=self._rounds.steps_taken > 0,
                shard_size=mesh.shard_size,
            )


def _draw_error(operation: str) -> NotAvailableError:
    return NotAvailableError(
        "random numbers for a weight in shards would not be those of the whole weight",
        got=f"torch's {operation} of a shard",
        cause="each rank draws for its own rows; on CPUs the same numbers as the others",
        fix='draw first values before register; for later draws, register(shard="whole")',
    )


def _places(roots: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """Each module below the roots with the name and the tensor of each of its own parameters."""
    for root in roots:
        for module in root.modules():
            for key, param in parameters_of(module).items():
                if param is not None:
                    yield module, key, param


def _keep_marks(old: torch.Tensor, new: Any) -> None:
    """Give a sharded parameter the hooks and the attributes that the user has put on it before."""
    if new is old:
        return
    vars(new).update(vars(old))
    if (hooks := tensor_hooks(old)) is not None:
        set_tensor_hooks(new, hooks)
    if (waiting := post_accumulate_grad_hooks(old)) is not None:
        set_post_accumulate_grad_hooks(new, waiting)


def _with_own_rows(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Of a whole optimizer's state that is about to be loaded, this rank's rows."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    params = dict(zip(numbers, held, strict=False))

    kept = {
        number: _own_rows_of_state(values, params.get(number))
        for number, values in state["state"].items()
    }
    return {**state, "state": kept}


def _own_rows_of_state(state: dict[str, Any], param: Any) -> dict[str, Any]:
    """See `own_rows_of_state`; the state of a parameter that stays whole is unchanged."""
    if not isinstance(param, DTensor):
        return state
    return own_rows_of_state(state, param.shape, partial(shard_like, shard=param))


def _parameter(held: Any) -> torch.nn.Parameter:
    assert isinstance(held, torch.nn.Parameter)
    return held


def _hand_over(optimizer: torch.optim.Optimizer, sharded: dict[int, Any]) -> None:
    """Put the shards in the place of an optimizer's parameters, and of its state.

    Also where its own attributes refer to parameters, by which it may choose among them.
    """
    new_of = {key: new for key, new in sharded.items() if id(new) != key}
    replace_in_attributes(optimizer, by_object(new_of))
    for group in optimizer.param_groups:
        # Optimizers may share it: then it holds shards already, and states do not.
        group["params"][:] = [sharded.get(id(param), param) for param in group["params"]]
    for param in list(optimizer.state):
        new = sharded.get(id(param), param)
        if new is not param:
            optimizer.state[new] = _own_rows_of_state(optimizer.state.pop(param), new)
