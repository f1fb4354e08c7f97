# SPDX-License-Identifier: Apache-2.0
"""`ShardedTransport`: gradients are summed and scattered by torch's ``fully_shard``, unit by unit.

torch gathers a unit before its forward and its backward, frees it, and reduces its gradients as
soon as its backward is done. The transport replaces the collectives in there, and so adds what
torch leaves to its user:

- The ranks compare what they are about to do (`UnitOrder`), so that no layer meets another one.
- Weighted means: the round controller has scaled the losses, or says by what a plain backward's
  gradients are multiplied. A unit's sum is divided by the number of ranks while it is in the cache;
  the round divides again only where the mean weight of the ranks is not 1.
- A backward of weight zero sends zeros, whatever it has computed (zero times infinity is NaN).
- A parameter that no rank has used has no gradient afterwards; torch's would be zero, and weight
  decay and momentum would move the weight.

Every backward reduces, also under ``no_sync``: a window's gradients are summed in shards, because
whole ones would take the memory that sharding saves. Only its end divides them by their weight.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import reduce
from itertools import chain
from operator import and_
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import GradientEdge

from lockstep._torch_compat import current_graph_task
from lockstep._torch_compat.fully_shard import (
    ShardedUnit,
    UnitCallbacks,
    divide_rows,
    forget_aborted_step,
    is_aborted,
)
from lockstep.crossed_gradients import leaves_behind
from lockstep.sync import round_error_texts, shard_error_texts
from lockstep.sync.end_of_backward import call_at_end
from lockstep.sync.parameter_hooks import is_accumulating
from lockstep.sync.round_contribution import PLAIN, Fault, RoundTotals
from lockstep.sync.transport_protocol import RoundResult, Transport
from lockstep.sync.unit_order import GATHER, REDUCE, UnitAction

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.sync.buckets import Slot
    from lockstep.sync.mesh_collectives import MeshCollectives
    from lockstep.sync.round_contribution import Contribution
    from lockstep.sync.transport_protocol import Gradients, RoundController
    from lockstep.sync.unit_order import UnitOrder

_STALE: Final = (
    "torch reduces the gradients of a unit that is called through its forward, and those alone",
    "call the model, and not a function of its weights; no gradient may be assigned by hand",
)


class ShardedTransport(Transport):
    """See `Transport`.

    Args:
        controller: defines the rounds in which the transport moves gradients.
        slots: the sharded parameters.
        signature: tells the rounds of these parameters from those of other ones.
        units: modules to which ``fully_shard`` was applied, by name, roots included.
        roots: those that lie within no other.
        order: compares what the ranks are about to do.
        collectives: of the ranks.
    """

    can_rejoin = True
    ends_late = True  # torch reduces the root's gradients at the end of a backward
    steps_alike = False
    stale_advice = _STALE
    needs_on_accumulated = False
    on_accumulated = None

    def __init__(
        self,
        controller: RoundController,
        slots: Sequence[Slot],
        signature: int,
        *,
        units: Mapping[str, nn.Module],
        roots: Sequence[nn.Module],
        order: UnitOrder,
        collectives: MeshCollectives,
    ) -> None:
        self._collectives = collectives
        self._controller = controller
        self._slots = list(slots)
        self._slot_of = {id(slot.param): slot for slot in slots}
        self._signature = signature
        self._roots = list(roots)
        self._order = order
        order.take_part = self._take_part
        self._round = 0
        self._contribution: Contribution | None = None
        self._scale = 1.0
        self._sends_zeros = self._accumulates = False
        self._task = -1  # of the last backward
        self._is_unit = False  # a unit's backward begins
        self._used: set[Slot] = set()
        callbacks = UnitCallbacks(
            before_forward=self._before_forward,
            before_backward=self._before_backward,
            before_reduction=self._before_reduction,
            refuse_write=self._refuse_write,
            refuse_replaced=self._refuse_replaced,
        )
        self._units = [ShardedUnit(module, callbacks) for module in units.values()]
        self._exchanges: list[_Exchange] = []
        for number, module in enumerate(units.values()):
            replaced: Any = module
            gather, reduce_scatter = _Gather(self, number), _ReduceScatter(self, number)
            replaced.set_custom_all_gather(gather)
            replaced.set_custom_reduce_scatter(reduce_scatter)
            self._exchanges += [gather, reduce_scatter]
            # torch's default divides by the number of ranks.
            replaced.set_gradient_divide_factor(1.0)
            replaced.set_force_sum_reduction_for_comms(True)

    # ------------------------------------------------------------------ collectives of a unit

    def gather(self, unit: int, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Fill `output` with the ranks' `rows` of a unit.

        Gradient:
            None: torch reduces gradients by a collective of its own.

        Collective:
            Every rank. A comparison (see `UnitOrder`), then one all-gather.

        Raises:
            UnitOrderError: on every rank, if the ranks are at different units.
        """
        self._order.compare(UnitAction(GATHER, unit, rows.numel(), rows.dtype))
        with self._order.own_collective():
            self._collectives.all_gather_into(output, rows)

    def reduce_scatter(self, unit: int, output: torch.Tensor, gradients: torch.Tensor) -> None:
        """The mean of the ranks' `gradients` of a unit, of which this rank keeps its rows.

        Gradient:
            Multiplied by the weight of a plain backward; zeros for a batch that does not count. A
            sum, and no mean, where the losses are sums.

        Collective:
            Every rank. A comparison (see `UnitOrder`), then one reduce-scatter.

        Raises:
            UnitOrderError: on every rank, if the ranks are at different units.
        """
        if self._sends_zeros or self._controller.weights.is_borrowed:
            gradients.zero_()
        elif self._scale != 1.0:
            gradients.mul_(self._scale)
        self._order.compare(UnitAction(REDUCE, unit, gradients.numel(), gradients.dtype))
        with self._order.own_collective():
            self._collectives.reduce_scatter(output, gradients)
        if self._controller.weights.averages:
            output.div_(self._collectives.mesh.size)

    def _take_part(self, action: UnitAction) -> None:
        """Join the other ranks in an action that this rank does not need; see `UnitOrder`.

        Gradient:
            Zeros.

        Collective:
            Every rank. That of the action.
        """
        num_ranks = self._collectives.mesh.shard_size
        assert action.dtype is not None, "a plan holds collectives of units"
        if action.what == GATHER:
            rows = self._units[action.unit].rows(action.dtype)
            self._collectives.all_gather_into(rows.new_empty(action.size * num_ranks), rows)
        else:
            device = self._slots[0].param.device
            zeros = torch.zeros(action.size, dtype=action.dtype, device=device)
            self._collectives.reduce_scatter(zeros.new_empty(action.size // num_ranks), zeros)

    # ------------------------------------------------------------------ what torch calls

    def _before_forward(self) -> None:
        """Before a unit's forward: tell the order whether a backward may follow."""
        self._order.may_begin_step = torch.is_grad_enabled()

    def _before_backward(self) -> None:
        """Before a unit's backward: tell the controller of a backward that it does not know of."""
        self._order.may_begin_step = False
        if is_first := (task := current_graph_task()) != self._task:
            # A parameter that this backward does not reach does not tell it from autograd.grad.
            leaves = chain.from_iterable(unit.leaves for unit in self._units)
            self._task, self._accumulates = task, any(map(is_accumulating, leaves))
        if not self._accumulates:
            self._refuse_gradients_of_gradients()
            return
        if is_first:
            call_at_end(self._reduce_late_gradients)  # after torch's own callback, before a round
        self._is_unit = True
        try:
            self._controller.backward_began(self._slots[0])
        except BaseException:
            self.forget_aborted_step()  # torch waits for the end of this backward
            raise
        finally:
            self._is_unit = False

    def _before_reduction(self, unit: ShardedUnit, used: list[nn.Parameter]) -> bool:
        """Note which parameters a unit's backward has used; False in ``torch.autograd.grad``."""
        if self._accumulates and self._collectives.mesh.size == 1:
            unit.scale_gradients(0.0 if self._sends_zeros else self._scale)
        if not self._controller.weights.is_borrowed:
            self._used.update(map(self._known_slot, used))
        return self._accumulates

    def _refuse_write(self, param: nn.Parameter) -> None:
        """Refuse a forward that writes to a weight: it is freed, and its rows are as before."""
        name = self._known_slot(param).name
        raise shard_error_texts.written_error(name, self._controller.place)

    def _refuse_replaced(self, param: nn.Parameter) -> None:
        """Refuse to gather a weight in whose place the program has put another one."""
        self.forget_aborted_step()
        name = self._known_slot(param).name
        raise shard_error_texts.replaced_error(f"`{name}`", self._controller.place)

    def choose_inputs(
        self, outputs: Sequence[Any], inputs: Sequence[Any], *, accumulates: bool
    ) -> Sequence[Any]:
        """The inputs of a backward, with the leaves that stand in its graph for its parameters.

        Args:
            outputs: of the graph.
            inputs: tensors, parameters among them, or edges of a graph.
            accumulates: False in ``torch.autograd.grad``, whose result would be this rank's own.

        Raises:
            NotAvailableError: the graph of a ``torch.autograd.grad`` reaches the leaf of an input.
        """
        leaf_of = {id(param): leaf for unit in self._units for param, leaf in unit.leaf_of_each}
        leaves = [leaf_of[id(each)] for each in inputs if id(each) in leaf_of]
        if accumulates or not leaves:
            return [*inputs, *leaves]
        nodes = [each.node if isinstance(each, GradientEdge) else each.grad_fn for each in outputs]
        reached = {id(leaf) for node in nodes if node is not None for leaf in leaves_behind(node)}
        if any(id(leaf) in reached for leaf in leaves):
            raise shard_error_texts.gradient_asked_error(self._controller.place)
        return inputs

    def refuse_assigned_data(self) -> None:
        """Refuse ``parameter.data = tensor``, of which a shard's rows take no notice.

        Raises:
            NotAvailableError: it was assigned since the last call.
        """
        for unit in self._units:
            if (param := unit.find_assigned()) is not None:
                name = self._known_slot(param).name
                raise shard_error_texts.assigned_error(name, self._controller.place)

    def _refuse_assigned_gradients(self) -> None:
        for slot in self._slots:
            if slot.has_assigned_data:
                place = self._controller.place
                raise shard_error_texts.assigned_gradient_error(slot.name, place)

    def _refuse_gradients_of_gradients(self) -> None:
        """Refuse ``autograd.grad(create_graph=True)``: its graph reads weights that are freed."""
        if torch.is_grad_enabled():
            self.forget_aborted_step()
            raise shard_error_texts.gradient_of_gradient_error(self._controller.place)

    def _reduce_late_gradients(self) -> None:
        """At the end of a backward: reduce what came to a unit after it had reduced.

        A cast that autocast keeps from an earlier forward brings its gradient at the end of a
        backward, and so does what a module keeps for the loss. The ranks compare their order here,
        too.

        Collective:
            Every rank: those of the units that have such gradients.
        """
        for unit in self._units:
            if unit.has_late_gradients:
                self._accumulates = True
                unit.reduce_late_gradients()

    def _known_slot(self, param: nn.Parameter) -> Slot:
        if id(param) not in self._slot_of:
            got = f"one of shape {tuple(param.shape)}"
            raise shard_error_texts.replaced_error(got, self._controller.place)
        return self._slot_of[id(param)]

    def check_backward(self, slot: Slot) -> None:
        """See `Transport`: refuses a gradient that comes to a shard by another way than its unit.

        Each rank's loss is a function of its own, and nobody adds up what comes so: a penalty on
        ``parameter.full_tensor()`` would count as one rank's part of the mean.
        """
        if not self._is_unit:
            raise shard_error_texts.penalty_error(slot.name, self._controller.place)

    # ------------------------------------------------------------------ a backward

    def open_window(self, kind: str, *, is_first: bool) -> None:
        """See `Transport`."""
        if is_first:
            self._refuse_assigned_gradients()
        weights = self._controller.weights
        self._scale = 1.0
        if kind == PLAIN and weights.averages:
            delivered = weights.delivered
            self._scale = (1.0 if delivered is None else delivered) / weights.unit(PLAIN)

    @contextmanager
    def backward(self, replacement_gradients: Gradients | None) -> Iterator[None]:
        """See `Transport`: what the peers' gradients add to is what `replacement_gradients` hold.

        The round controller has taken the gradients of before out of ``parameter.grad``.
        """
        self._sends_zeros = replacement_gradients is not None
        try:
            yield
            self._reduce_late_gradients()  # of a backward that torch has not noticed
        finally:
            self._sends_zeros = False
        for slot, earlier in (replacement_gradients or {}).items():
            arrived = slot.param.grad
            slot.param.grad = earlier if arrived is None else earlier + arrived

    @property
    def already_reduced(self) -> Collection[Slot]:
        """See `Transport`: a backward's gradients are summed over the ranks when it ends."""
        return self._slots

    # ------------------------------------------------------------------ rounds

    def begin(self, contribution: Contribution, step: int) -> None:
        """See `Transport`."""
        contribution.check = self._signature * 256 + (self._round + 37 * step) % 256
        self._contribution = contribution

    def finish(self, faults: Sequence[Fault]) -> RoundResult:
        """See `Transport`.

        Collective:
            Every rank. A comparison, in which the ranks' sums travel.
        """
        contribution = self._contribution
        assert contribution is not None
        contribution.faults += faults
        totals, used_anywhere = self._exchange(contribution)
        used_all = len(self._used) == len(self._slots)
        self._round += 1
        self._used.clear()
        with torch.no_grad():
            self._write_gradients(totals, used_anywhere)
        return RoundResult(
            took_place=True,
            has_gradients=totals.plain + totals.weighted > 0,
            used_all=used_all,
            sums_to_judge=[(totals, contribution)],
        )

    def _exchange(self, contribution: Contribution) -> tuple[RoundTotals, list[bool]]:
        """The sums over the ranks, and which parameters any of them has used.

        The weight is the ranks' mean, as the gradients are. Both travel with the comparison at the
        end of the backward: an all-reduce of their own would be one more wait for all ranks.
        """
        # A number for each parameter would be a long message, and most steps use all of them.
        unused = sum(1 << i for i, slot in enumerate(self._slots) if slot not in self._used)
        counted = contribution.num_backwards
        told = self._order.end_round([f"{unused:x}", counted, *contribution.sums(1.0)])
        masks, counts, *sums = zip(*told, strict=True)
        totals = RoundTotals(*map(sum, sums))
        if len(set(counts)) > 1:
            # Each backward was summed over the ranks: one that zeroed its rows has zeroed others'.
            got = f"backwards since then, by rank: {', '.join(map(str, counts))}"
            contribution.faults.append(Fault("given_up_on_some_ranks", got))
            totals = totals._replace(faults=float(len(counts)))
        mean = totals._replace(weight=totals.weight / self._collectives.mesh.size)
        unused_anywhere = reduce(and_, (int(mask, 16) for mask in masks))
        return mean, [not unused_anywhere >> number & 1 for number in range(len(self._slots))]

    def _write_gradients(self, totals: RoundTotals, used: list[bool]) -> None:
        is_refused = bool(totals.faults) or not totals.weight > 0.0
        reduced = {
            slot: gradient
            for slot, is_used in zip(self._slots, used, strict=True)
            if is_used and not is_refused and (gradient := slot.param.grad) is not None
        }
        if reduced and self._controller.weights.averages and totals.weight != 1.0:
            divide_rows(reduced.values(), totals.weight)
        for slot in self._slots:
            slot.set_reduced(reduced.get(slot))

    @property
    def is_half_sent(self) -> bool:
        """See `Transport`: the next comparison refuses ranks that are at different places."""
        return False

    def reset(self, *, has_failed: bool) -> None:
        """See `Transport`."""
        self._used.clear()
        self._contribution = None
        if has_failed:
            self.forget_aborted_step()

    def accept_changes(self) -> None:
        """See `Transport`: refuses gradients of a backward that no unit has noticed."""
        if any(unit.has_late_gradients for unit in self._units):
            self.forget_aborted_step()  # a later backward would add them to its own
            raise shard_error_texts.unnoticed_error(self._controller.place)
        self.refuse_assigned_data()
        self._refuse_assigned_gradients()
        for slot in self._slots:
            slot.accept_changes()

    def move_to(self, mesh: DeviceMesh, collectives: MeshCollectives) -> None:
        """Share the parameters out over the mesh of another group; their values are lost."""
        self._collectives = collectives
        for unit in self._units:
            unit.move_to(mesh)
        self._order.reset()
        self._round = 0  # a rank that is new has finished none

    def close(self) -> None:
        """See `Transport`: the model stays in shards, and its forwards are refused."""
        for unit in self._units:
            unit.release()
        for exchange in self._exchanges:
            exchange.transport = None

    @property
    def was_aborted(self) -> bool:
        """Whether a forward or a backward has ended in the middle, and nothing was freed since."""
        return any(map(is_aborted, self._roots))

    def forget_aborted_step(self) -> None:
        """Free what a forward or a backward that raised has gathered, and drop its gradients."""
        for root in self._roots:
            forget_aborted_step(root)
        for unit in self._units:
            unit.drop_gradients()


class _Exchange:
    """A collective of one unit, in the place of torch's.

    Attributes:
        transport: None once it is closed.
    """

    def __init__(self, transport: ShardedTransport, unit: int) -> None:
        self.transport: ShardedTransport | None = transport
        self._unit = unit

    def open_transport(self) -> ShardedTransport:
        if self.transport is None:
            raise round_error_texts.detached_error("a sharded model")
        return self.transport

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _Gather(_Exchange):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool
    ) -> None:
        self.open_transport().gather(self._unit, output_tensor, input_tensor)


class _ReduceScatter(_Exchange):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.open_transport().reduce_scatter(self._unit, output_tensor, input_tensor)
