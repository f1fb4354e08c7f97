# SPDX-License-Identifier: Apache-2.0
"""`ShardedOptimizer`: each rank steps its own rows of the parameters, and keeps their state alone.

The user's own object stays. Outside of its `step` its `param_groups` hold the model's parameters,
whole and with whole gradients, for clipping, scalers and schedulers.
While its `step` runs they are shards (`parameter_shards`). Afterwards the ranks exchange their
rows. An optimizer within it that shares its groups steps shards, too.
`torch.distributed.optim.ZeroRedundancyOptimizer` shares out whole parameters instead, and is an
object of its own.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Adafactor, Optimizer

from lockstep._torch_compat import is_step_wrapper
from lockstep._torch_compat.lost_writes import find_lost_writes
from lockstep._torch_compat.shard_operations import (
    draw_whole,
    reduce_empty_shards,
    reduce_scalars_when_read,
)
from lockstep.errors import LockstepError, NotAvailableError
from lockstep.local_rows import LocalRows
from lockstep.sync.optimizer_inspection import (
    inner_optimizers,
    needs_closure,
    optimizer_parameters,
)
from lockstep.sync.optimizer_step_patch import OptimizerStepPatch
from lockstep.sync.parameter_references import SwappedReferences, by_object
from lockstep.sync.parameter_shards import cut_states_by_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lockstep.sync.parameter_shards import ParameterShard, ParameterShards


def needs_whole_step(optimizer: Optimizer) -> bool:
    """Whether every rank has to step all rows of an optimizer's parameters.

    An optimizer that evaluates the loss within a step may compute with the weights from before it.
    Adafactor's state is a row and a column: sharding saves nothing, and DTensor lacks an operation.
    The same holds for one that has such an optimizer within it.
    """
    members = (optimizer, *inner_optimizers(optimizer))
    return any(isinstance(each, Adafactor) or needs_closure(each) for each in members)


class ShardedOptimizer:
    """Replaces the step of one optimizer by a sharded one, until `release`.

    Args:
        optimizer: the user's. Of the state that it has already, each rank keeps its rows.
        shards: of its parameters.
        wait_for_peers: waits until every rank is about to step this optimizer.
        gather: fetches the peers' rows of whole tensors.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shards: ParameterShards,
        *,
        wait_for_peers: Callable[[], None],
        gather: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        self.optimizer = optimizer
        self._shards = shards
        self._wait_for_peers = wait_for_peers
        self._gather = gather
        self._whole_groups: list[list[torch.Tensor]] = []
        self._in_step: list[ParameterShard] = []
        self._stepped: list[ParameterShard] = []
        self._references = SwappedReferences()
        for param, state in optimizer.state.items():
            if shards.shard_of(param) is not None:
                state.update(shards.shard_state(state, param))
        self._load_hooks = [
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            *(
                each.register_load_state_dict_pre_hook(self._before_load_within)
                for each in inner_optimizers(optimizer)
            ),
        ]
        self._own_step = _own_step(optimizer)
        self._replaced = OptimizerStepPatch(optimizer, self._step)

    def release(self) -> None:
        """Make the optimizer an ordinary one again; each rank keeps its rows of the state."""
        for hook in self._load_hooks:
            hook.remove()
        self._replaced.restore()

    # ------------------------------------------------------------------------------- a step

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Step this rank's rows, and exchange them.

        Gradient:
            ``parameter.grad``, whole and alike on every rank, is consumed.

        Collective:
            Every rank: DTensor's collectives where the optimizer takes norms, or reads a number of
            a shard, an exchange of the weights' rows, and one all-reduce for each norm or sum that
            the optimizer keeps. With a closure, one more exchange before each evaluation.

        Raises:
            GradientNotReducedError: another rank is at another place; nothing has changed.
            NotAvailableError: the optimizer put other tensors in the place of its parameters, or
                wrote to a part of what is sharded.
            PeerLostError: a rank left the step out, or went away.
        """
        self._wait_for_peers()
        if callable(kwargs.get("closure")):
            kwargs["closure"] = self._with_whole_weights(kwargs["closure"])
        elif args and callable(args[0]):
            args = (self._with_whole_weights(args[0]), *args[1:])
        self._swap_in()
        try:
            with self._as_whole_tensors():
                result = self._own_step(self.optimizer, *args, **kwargs)
        except BaseException as error:
            moved = self._swap_out()
            if isinstance(error, Exception) and moved:
                # Peers whose step went well wait in the gather. Without it, the rows that this
                # rank has updated would also differ from the peers' copies.
                with suppress(LockstepError):
                    self._gather(moved)
            raise
        self._gather(self._swap_out())
        for shard in self._stepped:
            shard.check()
        for member in self._members():
            cut_states_by_rows(member, [shard.whole for shard in self._stepped])
        return result

    @staticmethod
    @contextmanager
    def _as_whole_tensors() -> Iterator[None]:
        """Inside, an operation on a shard is that on the whole tensor, or refused."""
        with ExitStack() as stack:
            stack.enter_context(reduce_scalars_when_read())
            stack.enter_context(reduce_empty_shards())
            stack.enter_context(draw_whole(_draw_error))
            stack.enter_context(find_lost_writes(_lost_error))
            yield

    def _with_whole_weights(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self._gather(self._swap_out())
            loss = closure(*args, **kwargs)
            self._swap_in()
            return loss

        return evaluate

    def _swap_in(self) -> None:
        """Put the shards in the place of their parameters, in the groups and in the states."""
        optimizer = self.optimizer
        self._whole_groups = [list(group["params"]) for group in optimizer.param_groups]
        shards = {
            id(param): shard
            for params in self._whole_groups
            for param in params
            if (shard := self._shards.shard_of(param)) is not None
        }
        # An optimizer may have been given a set, of another order on every rank.
        self._in_step = sorted(shards.values(), key=lambda shard: shard.number)
        for shard in self._in_step:
            shard.begin_step()
        for group, params in zip(optimizer.param_groups, self._whole_groups, strict=True):
            # In place: an optimizer may keep the list itself.
            group["params"][:] = [
                shards[id(param)].param if id(param) in shards else param for param in params
            ]
        for member in self._members():
            # One with groups of its own goes on to step whole parameters, on every rank alike.
            held = set(map(id, optimizer_parameters(member)))
            for shard in self._in_step:
                if id(shard.param) in held and shard.whole in member.state:
                    member.state[shard.param] = self._own_rows(member, shard)
        shard_of = {id(shard.whole): shard.param for shard in self._in_step}
        self._references.swap_in(self._members_of_shards(), by_object(shard_of))

    def _members_of_shards(self) -> list[Optimizer]:
        """The optimizers that hold shards now."""
        shards = {id(shard.param) for shard in self._in_step}
        return [
            each
            for each in self._members()
            if not shards.isdisjoint(map(id, optimizer_parameters(each)))
        ]

    def _members(self) -> list[Optimizer]:
        """The optimizer, and those within it that share what it holds: shards within a step."""
        return [self.optimizer, *inner_optimizers(self.optimizer)]

    def _own_rows(self, member: Optimizer, shard: ParameterShard) -> Any:
        """Take the state of a parameter out of `member`, with this rank's rows of what is whole.

        The state of an optimizer within another one is whole until it first steps a shard: a loop
        may step it by itself, with whole parameters (SAM's `second_step`).
        """
        state = member.state.pop(shard.whole)
        if isinstance(state, dict):
            state.update(self._shards.shard_state(state, shard.whole))
        return state

    def _swap_out(self) -> list[torch.Tensor]:
        """Put the parameters back; returns the tensors whose rows have to be gathered."""
        optimizer, stepped = self.optimizer, self._in_step
        whole_of = {id(shard.param): shard.whole for shard in stepped}
        self._references.swap_out(self._members_of_shards(), by_object(whole_of))
        self._in_step = []
        if not stepped:
            return []
        for member in self._members():
            for shard in stepped:
                if shard.param in member.state:
                    member.state[shard.whole] = member.state.pop(shard.param)
        for group, params in zip(optimizer.param_groups, self._whole_groups, strict=False):
            group["params"][:] = params
        self._stepped = stepped
        return [tensor for shard in stepped for tensor in shard.end_step()]

    # ------------------------------------------------------------------------------ its state

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Load only this rank's rows of a whole state."""
        return self._with_rows(optimizer, state, (torch.Tensor, LocalRows))

    def _before_load_within(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """As `_before_load`; what is whole stays so until a step, see `_own_rows`."""
        return self._with_rows(optimizer, state, (LocalRows,))

    def _with_rows(
        self, optimizer: Optimizer, state: dict[str, Any], kinds: tuple[type, ...]
    ) -> dict[str, Any]:
        held = optimizer_parameters(optimizer)
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        params = dict(zip(numbers, held, strict=False))
        kept = dict(state["state"])
        for number in kept.keys() & params.keys():
            kept[number] = self._shards.shard_state(kept[number], params[number], kinds)
        return {**state, "state": kept}


def _draw_error(operation: str) -> NotAvailableError:
    return NotAvailableError(
        'this optimizer cannot step under sync="fsdp"',
        got=f"torch's {operation} of a shard",
        cause="it draws by the values of a tensor, of which each rank has its own rows",
        fix='draw by shape (torch.rand_like(param) < probabilities), or sync="replicate"',
    )


def _lost_error(operation: str) -> NotAvailableError:
    return NotAvailableError(
        'this optimizer cannot step under sync="fsdp"',
        got=f"it wrote to a part that {operation} has taken along the sharded dimension, the first",
        cause="what it steps is a shard, and such a part is a copy: the write would be lost",
        fix="compute with whole tensors in the optimizer (a factor for each row, as in"
        ' `param.mul_(factors)`), or sync="replicate"',
    )


def _own_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's own `step`, without torch's hooks and schedulers' wrappers around it."""
    own = vars(optimizer).get("step")
    step: Any = type(optimizer).step if own is None else own
    step = getattr(step, "__func__", step)
    while is_step_wrapper(step):
        own, step = None, step.__wrapped__
    if own is None or isinstance(own, MethodType):
        found: Callable[..., Any] = step
        return found
    return lambda _, *args, **kwargs: step(*args, **kwargs)
