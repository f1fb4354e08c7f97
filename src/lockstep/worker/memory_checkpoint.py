# SPDX-License-Identifier: Apache-2.0
"""`MemoryCheckpoints`: copies of the ranks' shards in each other's memory, against a death.

Design note. Under ``sync="fsdp"`` no rank has the whole state, so a death takes a part of it away.
Every few steps each rank copies its own part to the CPU, and sends the copy to a partner, on
another host if the hosts have as many ranks. After a death every rank goes back to the newest step
of which all parts are left, and computes the steps since then again (`replay`).

- A checkpoint counts once all its parts have arrived. The ranks then meet in one small exchange;
  a rank that comes out of it drops the older checkpoint. So either a rank has come out, and every
  part of the new checkpoint had arrived; or none has, and all ranks still hold the older one.
- The steps between two checkpoints follow from a measurement: a checkpoint may take one part in a
  hundred of the time (`_COST`).
- Where ranks hold several copies of a model (HSDP), a rank's copy of its own part is enough: the
  ranks of the other copies have the same rows. Nothing is sent then. And where the survivors have
  undone the open step, what they have is a checkpoint itself (`take_without_peers`): no committed
  step is computed again, as long as of all rows one copy is left at the same step.
- What changes the state besides training (a user's function, a loaded state) cannot be computed
  again, so the driver renews the checkpoint after each such call.
- When a checkpoint goes to the disk each rank notes how training went on from it (`_note_saved`):
  where a part is lost with all ranks that had it, the run can go on from that checkpoint.

Sources: checkpoints in the memory of peers are those of Gemini (Wang et al., SOSP 2023).
Rejected: parity of several parts in the place of a copy (Reed-Solomon): it saves memory on the
host, which is cheap beside a device's, and costs arithmetic at each checkpoint.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from lockstep.local_rows import LocalRows
from lockstep.operator.buffer_values import buffer_values
from lockstep.operator.object_transfer import send_bytes
from lockstep.phases import Phase, in_phase
from lockstep.tensor_tree import leaves_of, tree_map
from lockstep.worker.per_rank_state import PER_RANK
from lockstep.worker.state_broadcast import from_messages, messages_of
from lockstep.worker.state_dict import copy_own_rows, unsaved_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lockstep.group import Group
    from lockstep.operator.buffer_values import BufferValues
    from lockstep.worker.loop_run import LoopProgress, LoopRequest
    from lockstep.worker.state_access import StateAccess

_COST: Final = 0.01
"""The part of the time that checkpoints may take."""

_MOST_SAVED: Final = 8
"""Checkpoints on the disk, or on their way, from which the run can go on."""

_FIRST_INTERVAL: Final = 8
"""Steps from the first checkpoint until the second one, when a step's time is known."""


class MemoryCheckpoint(NamedTuple):
    """The name of one checkpoint.

    Attributes:
        is_of_survivors: it is what the ranks of a broken group hold, see `take_without_peers`.
        number: a later one has a larger number.
        step: committed steps of the run.
        size: the number of parts, which together are the state.
    """

    is_of_survivors: bool
    number: int
    step: int
    size: int


@dataclass(frozen=True)
class Part:
    """What one rank has of the run's state: its rows of what is in shards, and a copy of the rest.

    Attributes:
        state: as `StateAccess.state_dict` returns it, with `LocalRows` in the place of shards.
        buffers: of the modules, see `buffer_values`.
        parameters: those that `state` does not hold, see `unsaved_parameters`.
        gradients: those that a later step of the loop may use; None where none does.
        weighed_by: see `OperatorState`.
        call: the number of the call of `train` that goes on from it, or is the next one.
        progress: how far that call had come; None if it had not begun.
        is_unreduced: `gradients` are of a window that no round has closed.
    """

    state: dict[str, Any]
    buffers: BufferValues
    parameters: list[Any]
    gradients: list[Any] | None
    weighed_by: dict[str, str]
    call: int
    progress: LoopProgress | None
    is_unreduced: bool = False


@dataclass(frozen=True)
class TrainCall:
    """A call of `train`, so that its steps can be computed again.

    Attributes:
        number: among all calls of the run.
        request: its arguments.
        step: committed steps of the run when it began.
        num_batches_to_recompute: see `Worker`.
    """

    number: int
    request: LoopRequest
    step: int
    num_batches_to_recompute: int

    def steps_at(self, step: int) -> int:
        """The call's own count of steps when the run has committed `step`."""
        return step - self.step - self.num_batches_to_recompute


class MemoryCheckpoints:
    """One rank's part of the latest memory checkpoints, and its partner's.

    Args:
        worker: whose state is copied.

    Attributes:
        calls: the calls of `train` since the oldest state to which the ranks can go back, in order.
        saved: for checkpoints that were copied for the disk, what those do not hold: the place in
            the call, which parameters train, buffers. Parts of an empty
            state, by the step and the call of the copy: a step may come again after `load`.
        taken_in: the call of `train` that goes on from the latest one, see `Part`.
        reached: committed steps and epoch to which training has come; a state that is loaded since
            does not count.
    """

    def __init__(self, worker: StateAccess) -> None:
        every = worker.spec.memory_checkpoint_every
        self._worker = worker
        self._is_measured = every == "auto"
        self._interval = every if isinstance(every, int) else _FIRST_INTERVAL
        self._parts: dict[tuple[MemoryCheckpoint, int], Part] = {}
        self._own: dict[MemoryCheckpoint, Part] = {}
        self._number = 0
        self._taken_at = 0
        self._ended_at = 0.0
        self._num_calls = 0
        self.calls: list[TrainCall] = []
        self.saved: dict[tuple[int, int], Part] = {}
        self.taken_in: tuple[int, LoopProgress | None] = 0, None
        self.reached = 0, 0

    @property
    def held(self) -> tuple[tuple[MemoryCheckpoint, int], ...]:
        """The parts that this process can give back: of which checkpoint, and which one of it."""
        return tuple(self._parts)

    def part(self, checkpoint: MemoryCheckpoint, number: int) -> Part:
        return self._parts[checkpoint, number]

    def own_part(self, checkpoint: MemoryCheckpoint) -> Part | None:
        """The part that this process made; None if it was not there yet."""
        return self._own.get(checkpoint)

    def take_without_peers(self, progress: LoopProgress | None, *, is_within_call: bool) -> None:
        """Copy this rank's part of the last committed step, after its group has broken.

        The next checkpoint replaces it; another loss before that finds it again.

        Args:
            progress: of the call that was interrupted.
            is_within_call: this rank has not come to the end of that call, which is of `train`.
        """
        worker, mesh = self._worker, self._worker.mesh
        is_within = is_within_call and bool(self.calls)
        taken_in = (self.calls[-1].number, progress) if is_within else (self._num_calls, None)
        part = _take_part(worker, taken_in, with_gradients=False)
        held = MemoryCheckpoint(True, 0, part.state["global_step"], mesh.shard_size)
        self._parts[held, mesh.shard_rank] = self._own[held] = part

    def begin_call(self, request: LoopRequest) -> None:
        """Note that a call of `train` begins at the present step."""
        worker = self._worker
        step, recomputed = worker.operator._lockstep.committed, worker.num_batches_to_recompute
        self.calls.append(TrainCall(self._num_calls, request, step, recomputed))
        worker.call_number = self._num_calls
        self._num_calls += 1

    def go_back(
        self,
        part: Part,
        calls: Sequence[TrainCall],
        saved: Mapping[tuple[int, int], Part],
        reached: tuple[int, int],
    ) -> None:
        """Note that the state of `part` was loaded, and which calls lead on from there.

        Args:
            part: this rank's.
            calls: of a rank that has made those since then.
            saved: of the same rank.
            reached: where the calls lead to.
        """
        self.reached, self.calls, self.saved = reached, list(calls), dict(saved)
        self._num_calls = max([part.call, *(call.number + 1 for call in self.calls)])
        self._worker.call_number = self._num_calls - 1
        self.taken_in = part.call, part.progress

    def calls_to_repeat(self) -> list[TrainCall]:
        """The calls that lead from the state that was loaded last to where the run was."""
        return [call for call in self.calls if call.number >= self.taken_in[0]]

    def _note_saved(self, progress: LoopProgress | None) -> None:
        """Note that the state of this moment was copied for the disk.

        Args:
            progress: of the call; None after it.
        """
        worker = self._worker
        # No checkpoint on the disk holds what such a loop has between two batches, gradients that
        # wait, what is each rank's own, and weights that a model's `state_dict` leaves out.
        if (
            worker.operator._lockstep_overrides_loop()
            or worker.rollback.window_gradients() is not None
            or worker.run.has_local_tensors
            or unsaved_parameters(worker.run)
        ):
            return
        call = self._num_calls if progress is None else worker.call_number
        name = worker.operator._lockstep.committed, worker.call_number
        self.saved[name] = _take_rest(worker, (call, progress))
        self.saved = dict([*self.saved.items()][-_MOST_SAVED:])

    def rewind_call(self, epoch: int, step_in_epoch: int) -> None:
        """Set the counts back to where the present call of a user's `train_epoch` began."""
        state = self._worker.operator._lockstep
        state.committed = self._worker.operator.global_step = self.calls[-1].step
        if state.step_log is not None:
            state.step_log.rewind_to(state.committed)
        self._worker.cursors["train"].move_to(epoch, step_in_epoch)

    def before_batch(
        self, progress: LoopProgress, *, is_settled: bool, is_saved: bool = False
    ) -> None:
        """Between two batches of a call: take a checkpoint if one is due.

        Args:
            progress: of the call.
            is_settled: no gradients wait for the next batch.
            is_saved: the state of this moment was copied for the disk.

        Collective:
            As `take`, before a batch that is the same on all ranks.
        """
        worker = self._worker
        if is_saved:
            self._note_saved(progress)
        due_at = self._taken_at + self._interval
        if (
            is_settled
            and not worker.has_own_epoch
            and worker.operator._lockstep.committed >= due_at
        ):
            self.take((self.calls[-1].number, progress))

    def after_call(self, *, is_saved: bool = False) -> None:
        """After a call of `train`; take a checkpoint if nothing can go back into its middle.

        Args:
            is_saved: see `before_batch`.

        Collective:
            As `take`, if the loop is a user's `train_epoch`.
        """
        self._note_reached()
        if is_saved:
            self._note_saved(None)
        if self._worker.has_own_epoch:
            self.take_between_calls()

    def renew(self) -> None:
        """Between calls: `take` a checkpoint, because no older one leads to the present state."""
        self.saved.clear()
        self.take_between_calls()

    def take_between_calls(self) -> None:
        """See `take`."""
        self.take((self._num_calls, None))
        self._note_reached()

    def _note_reached(self) -> None:
        cursor = self._worker.cursors.get("train")
        steps = self._worker.operator._lockstep.committed
        self.reached = steps, 0 if cursor is None else cursor.epoch

    @in_phase(Phase.COPYING_STATE)
    def take(self, taken_in: tuple[int, LoopProgress | None]) -> None:
        """Copy this rank's part, and exchange copies with the partners.

        Args:
            taken_in: the call of `train` that goes on from here, see `Part`.

        Collective:
            Every rank, between two steps. Two small all-gathers, and an all-to-all for each large
            tensor unless there are several copies of the models.

        Raises:
            PeerLostError: a rank went away. The older checkpoint is still there.
        """
        worker, began = self._worker, time.monotonic()
        state = worker.operator._lockstep
        group: Group = state.context.group
        holds_gradients = worker.rollback.window_gradients() is not None
        seen = group.exchange(
            [self._number, self._interval, worker.operator.local_rank, holds_gradients]
        )
        # A new process takes over the number and the interval. A number is used once: after a
        # failure in the middle, parts of two attempts must not be taken for one checkpoint.
        newest, interval = max(seen)[:2]
        self._number, self._interval = newest + 1, interval
        mine = _take_part(worker, taken_in, with_gradients=any(each[3] for each in seen))
        mesh = worker.mesh
        taken = MemoryCheckpoint(False, self._number, mine.state["global_step"], mesh.shard_size)
        self._parts[taken, mesh.shard_rank] = self._own[taken] = mine
        if mesh.size > 1 and mesh.replicate_size == 1:
            to, source = _partners([each[2] for each in seen], group.rank)
            self._parts[taken, source] = _exchange_with(group, mine, to, source)
        steps = state.committed - self._taken_at
        each_s = (began - self._ended_at) / steps if self._ended_at and steps > 0 else math.inf
        times = group.exchange([time.monotonic() - began, each_s])
        # Past the exchange every rank has all that it is to hold of this checkpoint.
        self._parts = {key: part for key, part in self._parts.items() if key[0] == taken}
        self._own = {taken: mine}
        self._taken_at, self._ended_at = state.committed, time.monotonic()
        self.taken_in = taken_in
        oldest = min([taken_in[0], *(rest.call for rest in self.saved.values())])
        self.calls = [call for call in self.calls if call.number >= oldest]
        # The rank that came last has waited for nobody.
        self._measure(min(cost for cost, _ in times), min(each for _, each in times))

    def _measure(self, cost_s: float, step_s: float) -> None:
        if self._is_measured and math.isfinite(step_s):
            self._interval = max(1, math.ceil(cost_s / (_COST * max(step_s, 1e-6))))


def tracked_weights(worker: StateAccess) -> list[torch.Tensor]:
    """The weights to which a forward may write.

    None of a model in units whose state comes from an older memory checkpoint after a death.
    """
    sync = worker.operator._lockstep.sync
    in_units = sync is not None and bool(sync.units)
    if in_units and worker.spec.keeps_memory_checkpoints and worker.mesh.replicate_size == 1:
        return []
    return list(worker.run.parameters())


def _take_part(
    worker: StateAccess, taken_in: tuple[int, LoopProgress | None], *, with_gradients: bool
) -> Part:
    parameters = worker.run.parameters()
    gradients = [copy_own_rows(p.grad) for p in parameters] if with_gradients else None
    state = worker.own_state_dict()
    unsaved = [copy_own_rows(each) for each in unsaved_parameters(worker.run, state)]
    return replace(
        _take_rest(worker, taken_in),
        state=state,
        parameters=unsaved,
        gradients=gradients,
        is_unreduced=worker.rollback.holds_unreduced_window,
    )


def _take_rest(worker: StateAccess, taken_in: tuple[int, LoopProgress | None]) -> Part:
    """What a checkpoint on the disk leaves out: a part with an empty state."""
    run, (call, progress) = worker.run, taken_in
    return Part(
        state={},
        buffers=buffer_values(run, copy_own_rows),
        parameters=[],
        gradients=None,
        weighed_by=dict(worker.operator._lockstep.weighed_by),
        call=call,
        progress=progress,
    )


def _partners(local_ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """The rank that gets a copy of this one's part, and the rank whose part comes here.

    First all first ranks of the hosts, then all second ones: where hosts have as many ranks, the
    next one is on another host.
    """
    order = sorted(range(len(local_ranks)), key=lambda each: (local_ranks[each], each))
    place = order.index(rank)
    return order[(place + 1) % len(order)], order[place - 1]


def _exchange_with(group: Group, part: Part, to: int, source: int) -> Part:
    """Send `part` to the rank `to`, and receive that of the rank `source`."""
    head, small, large = messages_of(part)
    mine = [head.numel(), small.numel(), *(each.numel() for each in large)]
    everyone = group.exchange(mine)
    # Ranks with few rows have fewer large tensors: all make as many exchanges.
    longest = max(map(len, everyone))
    sizes = everyone[source] + [0] * (longest - len(everyone[source]))
    sent = [head, small, *large]
    sent += [torch.empty(0, dtype=torch.uint8)] * (longest - len(sent))
    arrived = [
        send_bytes(group, message, to, source, size)
        for message, size in zip(sent, sizes, strict=True)
    ]
    received: Part = from_messages(arrived[0], arrived[1], arrived[2:])
    return received


def merge_parts(parts: Iterable[Part], mine: tuple[int, int], own: Part | None) -> Part:
    """The part of one rank among another number of ranks, from all old parts in order.

    Args:
        parts: number 0, 1, ...; each is dropped before the next one is asked for. They stay as
            they are: another loss may need them again.
        mine: the rank among those over which a copy is sharded, and their number.
        own: the part that this process made: what is each rank's own comes from there. None in a
            new process, which begins with those of rank 0.
    """
    base, targets = own, None
    for part in parts:
        base, found = base or part, _local_rows(_shared(part))
        targets = targets or [LocalRows.empty(e.shape, e.rows.dtype, *mine) for e in found]
        for target, rows in zip(targets, found, strict=True):
            target.take_from(rows)
    assert base is not None, "there is a part of each rank"
    filled = iter(targets or [])

    def put_in(leaf: Any) -> Any:
        return next(filled) if isinstance(leaf, LocalRows) else leaf

    state, parameters, gradients = tree_map(put_in, _shared(base))
    return replace(base, state=base.state | state, parameters=parameters, gradients=gradients)


def _shared(part: Part) -> list[Any]:
    """What the ranks share out of a part: all but what each has of its own."""
    state = {key: value for key, value in part.state.items() if key not in PER_RANK}
    return [state, part.parameters, part.gradients]


def _local_rows(tree: Any) -> list[LocalRows]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, LocalRows)]
