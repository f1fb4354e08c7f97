# SPDX-License-Identifier: Apache-2.0
"""N gradients become one, and every rank keeps a share of the weights and of what optimizers hold.

torch's `fully_shard` keeps the parameters as shards between steps and gathers them before the
first forward of a step. The gradients of the gathered parameters are synchronised like any
others (`GradientSync`), and each rank keeps its part. So everything that holds for ``replicate``
holds here: weights, windows, ranks without samples, branches, unused parameters.

Rejected: FSDP's own reduce-scatter. It averages over ranks, mixes the gradients of different
layers when branches differ, gives zeros to what nobody used, and needs every rank to run the
same forwards and backwards: a rank without samples would have to invent some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.errors import (
    ConfigurationError,
    NotAvailableError,
    PeerLostError,
    WrongUseError,
)
from lockstep.sync import guard
from lockstep.sync.buckets import Slot
from lockstep.sync.buffers import broadcast_tensors
from lockstep.sync.gradient_sync import GradientSync
from lockstep.sync.inventory import agree, take_inventory
from lockstep.sync.ownership import is_local

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from lockstep.group import Group

_FIX: Final = (
    "make the optimizer inside setup, right before register(); to go on from a checkpoint, use"
    " trainer.load(path)"
)


class _Sharded(Protocol):
    def unshard(self) -> None: ...
    def reshard(self) -> None: ...


class FSDPSync(GradientSync):
    """See `GradientSync`; its parameters are the gathered ones, the optimizers' the shards.

    Args:
        modules: of which each is sharded as a whole, in place. Scalars, complex parameters and
            those that several modules share stay whole on every rank.
        group: the ranks; its process group has to be torch's default group.
        optimizers: fresh; their parameters are exchanged for the shards.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        group: Group,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        bucket_cap_mb: float = 25,
        buffers: str = "after_backward",
        averages: bool = True,
    ) -> None:
        _refuse_used(optimizers)
        found = take_inventory(modules)
        agree(group, found, ["fsdp"])
        tensors = [place.tensor() for place in found.buffers.values()]
        everything = [*found.parameters.values(), *(t for t in tensors if t is not None)]
        broadcast_tensors(group, everything, cap_bytes=2**25)
        mesh = _mesh(group, next(iter(found.parameters.values())).device)
        plain = [_named(module) for module in modules]
        self._sharded = _shard_all(modules, mesh)
        shards = [_named(module) for module in modules]
        _exchange(plain, shards, optimizers)
        self._mesh: DeviceMesh | None = mesh
        self._is_open_for_use = False
        self._pairs: list[_Pair] = []
        self._gather()
        super().__init__(
            modules,
            group,
            bucket_cap_mb=bucket_cap_mb,
            broadcast=False,
            buffers=buffers,
            averages=averages,
        )
        whole = [_named(module) for module in modules]
        self._pairs = list(_pairs(shards, whole, self))
        self._known = [pair.shard.param.requires_grad for pair in self._pairs]
        guard.protect(self, [pair.shard for pair in self._pairs])
        self._handles = [
            # Before torch's own, which would gather one model at a time.
            module.register_forward_pre_hook(lambda *_: self._gather(), prepend=True)
            for module in self._sharded
        ]
        self.seal()

    # ------------------------------------------------------------------ whole, and in shards

    def begin_step(self, step: int) -> None:
        """Gather the weights, unless they are; and see `GradientSync.begin_step`.

        Collective:
            Every rank. One all-gather for each model whose weights are in shards.
        """
        super().begin_step(step)
        self._gather()

    def seal(self) -> None:
        """Give the gathered weights up; the shards count.

        Raises:
            WrongUseError: the gathered weights were changed in place: it would be lost.
        """
        if not self._is_open_for_use:
            return
        self._is_open_for_use = False
        changed = [p.shard.name for p in self._pairs if p.whole._version != p.version]
        for module in self._sharded:
            cast("_Sharded", module).reshard()
        self._follow_frozen()
        if changed:
            raise WrongUseError(
                "weights were changed in place between the beginning of a step and its backward",
                where=self.place,
                got=", ".join(f"`{name}`" for name in changed[:8]),
                cause='under sync="fsdp" these are copies for the step; the change would be lost',
                fix="change weights after optimizer.step(), under torch.no_grad()",
            )

    def agree_on_values(self) -> None:
        """Nothing to compare: what is used is gathered from all ranks."""

    def _gather(self) -> None:
        if self._is_open_for_use:
            return
        self._follow_frozen()
        try:
            for module in self._sharded:
                cast("_Sharded", module).unshard()
        except RuntimeError as error:
            raise PeerLostError(
                "gathering the weights failed", got=str(error).splitlines()[0]
            ) from error
        self._is_open_for_use = True
        for pair in self._pairs:
            pair.version = pair.whole._version

    def _follow_frozen(self) -> None:
        """A parameter is two objects here: what was done to one is done to the other."""
        for place, pair in enumerate(self._pairs):
            known = self._known[place]
            shard, whole = pair.shard.param.requires_grad, pair.whole.requires_grad
            if shard != whole:
                self._known[place] = wanted = shard if shard != known else whole
                pair.shard.param.requires_grad_(wanted)
                pair.whole.requires_grad_(wanted)

    # ------------------------------------------------------------------ the end of a round

    def _end_round(self) -> None:
        super()._end_round()
        with torch.no_grad():
            for pair in self._pairs:
                if pair.whole.grad is not None:
                    pair.keep_part(pair.whole.grad)
                    pair.shard.passed = self.rounds
                    pair.whole.grad = None
        self.seal()

    def forget_window(self) -> None:
        """Drop the gradients that were accumulated since the last round."""
        super().forget_window()
        for pair in self._pairs:
            pair.shard.param.grad = None

    def detach(self) -> None:
        """Take the hooks off and forget the group; the weights stay in shards."""
        if self._mesh is None:
            return
        super().detach()
        for handle in self._handles:
            handle.remove()
        guard.release(self, [pair.shard for pair in self._pairs])
        for module in self._sharded:
            _forget_group(module)
        # The weights keep the mesh, and a mesh keeps its groups by name.
        getattr(self._mesh, "_pg_registry", {}).clear()
        self._mesh = None


class _Pair:
    """One parameter: this rank's shard, which is trained, and the whole, which is used."""

    def __init__(self, shard: Slot, whole: torch.nn.Parameter) -> None:
        self.shard = shard
        self.whole = whole
        self.version = whole._version
        param = cast("DTensor", shard.param)
        self._mesh, self._placements = param.device_mesh, param.placements

    def keep_part(self, gradient: torch.Tensor) -> None:
        """Add this rank's rows of a whole gradient to the shard's."""
        local = rows_of_rank(gradient, self._mesh).clone(memory_format=torch.contiguous_format)
        part = DTensor.from_local(
            local,
            self._mesh,
            self._placements,
            run_check=False,
            shape=gradient.shape,
            stride=self.shard.param.stride(),
        )
        earlier = self.shard.param.grad
        self.shard.param.grad = part if earlier is None else earlier + part


def rows_of_rank(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The rows of a tensor that this rank of `mesh` keeps; maybe none."""
    height = -(-whole.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * height, whole.shape[0])
    return whole[first : first + height]


def sharded_like(shard: DTensor, whole: torch.Tensor) -> DTensor:
    """This rank's shard of `whole`, laid out as `shard` is. Communicates nothing."""
    local = rows_of_rank(whole, shard.device_mesh)
    return DTensor.from_local(
        local.to(shard.device, shard.dtype, copy=True).contiguous(),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which this may be a shard.

    Gradient:
        Back to the shard, as `DTensor.full_tensor` has it.

    Collective:
        Every rank of a shard's mesh. One all-gather; none for a tensor that is no shard.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_shards(parameters: Sequence[torch.Tensor], max_norm: float) -> None:
    """As torch's `clip_grad_norm_`, which takes shards and whole tensors, but not both at once.

    Gradient:
        Scaled in place, by the same number on every rank.

    Collective:
        Every rank of the mesh. One all-reduce of one number.
    """
    grads = [param.grad for param in parameters if param.grad is not None]
    shards = [grad for grad in grads if isinstance(grad, DTensor)]
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    local = [grad.to_local() for grad in shards]
    square = _square(local, grads[0])
    dist.all_reduce(square, group=shards[0].device_mesh.get_group())
    norm = (square + _square(whole, grads[0])).sqrt()
    torch._foreach_mul_([*local, *whole], (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _square(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(like.real.dtype if like.is_complex() else like.dtype, torch.float32)
    squares = [tensor.norm().to(dtype) ** 2 for tensor in tensors]
    zero = torch.zeros((), dtype=dtype, device=like.device)
    return torch.stack([zero, *squares]).sum()


def in_shards(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """`state` of whole tensors, with shards where `like` holds shards under the same key."""
    return {
        key: sharded_like(mine, value)
        if isinstance(mine := like.get(key), DTensor) and isinstance(value, torch.Tensor)
        else value
        for key, value in state.items()
    }


def optimizer_in_shards(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """A state of whole tensors as `optimizer`, which holds shards, can load it."""
    held = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    params = dict(zip(numbers, held, strict=True))
    kept = {
        number: {
            name: sharded_like(param, value)
            if isinstance(param := params[number], DTensor) and _is_alike(value, param)
            else value
            for name, value in own.items()
        }
        for number, own in state["state"].items()
    }
    return {**state, "state": kept}


def _is_alike(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _named(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def _exchange(
    before: Sequence[dict[str, torch.nn.Parameter]],
    after: Sequence[dict[str, torch.nn.Parameter]],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Let the optimizers hold the shards of what they held."""
    shards = {
        id(old): new[name]
        for own, new in zip(before, after, strict=True)
        for name, old in own.items()
    }
    for optimizer in optimizers:
        for options in optimizer.param_groups:
            options["params"] = [shards.get(id(param), param) for param in options["params"]]


def _pairs(
    shards: Sequence[dict[str, torch.nn.Parameter]],
    whole: Sequence[dict[str, torch.nn.Parameter]],
    owner: object,
) -> Iterator[_Pair]:
    seen: set[int] = set()
    for own, gathered in zip(shards, whole, strict=True):
        for name, shard in own.items():
            if isinstance(shard, DTensor) and id(shard) not in seen:
                seen.add(id(shard))
                yield _Pair(Slot(len(seen), name, shard, owner), gathered[name])


def _refuse_used(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for number, optimizer in enumerate(optimizers):
        if optimizer.state:
            raise ConfigurationError(
                "an optimizer that has stepped already cannot be sharded",
                where=f"optimizer {number} ({type(optimizer).__name__})",
                expected="one without state",
                got=f"state for {len(optimizer.state)} parameters",
                cause="what it remembers belongs to whole weights, which shards replace",
                fix=_FIX,
            )


def _mesh(group: Group, device: torch.device) -> DeviceMesh:
    if not dist.is_initialized() or dist.get_world_size() != group.size:
        raise NotAvailableError(
            "sharding needs the workers' group to be torch's default process group",
            cause="this process has a default group of its own, or hosts a rank beside others",
            fix='leave out use_local, or sync="fsdp"',
        )
    world = dist.group.WORLD
    assert world is not None
    return DeviceMesh.from_group(world, device.type)


def _shard_all(modules: Sequence[torch.nn.Module], mesh: DeviceMesh) -> list[torch.nn.Module]:
    """Shard `modules` in place, each as a whole; returns the units that are gathered."""
    units = list(dict.fromkeys(unit for module in modules for unit in _units(module)))
    seen: set[torch.nn.Parameter] = set()
    shared: set[torch.nn.Parameter] = set()
    for unit in units:
        own = set(unit.parameters())
        shared |= own & seen
        seen |= own
    return [unit for unit in units if _shard(unit, mesh, shared)]


def _units(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    # A container without a forward cannot be a unit; what is in it can.
    if type(module).forward is not torch.nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from _units(child)


def _shard(
    unit: torch.nn.Module, mesh: DeviceMesh, shared: AbstractSet[torch.nn.Parameter]
) -> bool:
    """False if nothing in it can be sharded: then it stays whole, on every rank."""
    params = set(unit.parameters())
    kept = {param for param in params if param in shared or not _has_rows(param)}
    if kept == params:
        return False
    fully_shard(unit, mesh=mesh, reshard_after_forward=False, ignored_params=kept)
    sharded = cast("FSDPModule", unit)
    sharded.set_requires_gradient_sync(False)
    sharded.set_reshard_after_backward(False)
    return True


def _has_rows(param: torch.nn.Parameter) -> bool:
    """Whether there is something to share out, and gloo and torch can carry it."""
    return not is_local(param) and param.dim() > 0 and param.numel() > 0 and not param.is_complex()


def _forget_group(module: torch.nn.Module) -> None:
    # The sockets close, and peers that wait wake up, with the last reference to the group.
    for param_group in cast("FSDPModule", module)._get_fsdp_state()._fsdp_param_groups:
        holders: list[Any] = [param_group, *param_group.fsdp_params]
        for holder in holders:
            holder.mesh_info.shard_process_group = None
