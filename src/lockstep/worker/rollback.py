# SPDX-License-Identifier: Apache-2.0
"""`Rollback`: undoes a step that is not committed, back to the beginning of its first batch.

Design note. A step is open from its first batch until this rank has committed it. After a peer's
death, an error or Ctrl-C in an open step, the step is undone and computed again. So `keep` copies,
before the first batch, what the step may change; `settle` drops the copies when the step is
committed; `undo` writes them back.

What has to be copied depends on when a rank can still be interrupted:

1. Buffers change in every forward, and a loss may freeze layers for a while: copied in each step.
2. In the default loop an optimizer steps after all communication of the step. If a peer dies
   before, weights and optimizer are unchanged: nothing more is copied. After an error that comes
   after ``optimizer.step()`` the weights cannot be restored: a complete step (`is_complete`) is
   kept, and an incomplete one ends the run.
3. A loop of the user's own may communicate after an optimizer has stepped: for a second optimizer,
   or by a gather. A peer's death interrupts it there, before the code that follows. Then weights,
   averages, optimizers and schedulers are copied before the first of the step's optimizers steps.
   The first steps show whether the loop does so (`LoopBehaviour`); in them everything is copied in
   any case. An optimizer that holds another one (SAM) may change weights and its own state where no
   step is seen: then the copies are from before the batch.
4. Optimizers that step elsewhere, at a parameter server, keep an undo log there. The server is told
   to which step it may have to go back (`_tell_server`). Their step communicates; therefore the
   worker copies the weights before each.
5. A forward may write to weights in any loop; see `in_place_writes`.
6. The user's own `state_dict`, where there is one, is copied in every step, for any line of the
   user's code may change what it holds (`UserStateCopy`).
7. A loop of the user's own may leave gradients to the next step, or to the next pass over the data.
   They are copied where the loop adds to them, which the first steps show, too; see
   `saved_gradients`.

Copies lie in memory that the next step reuses, and the undo writes them into the existing tensors:
a step must not pay for allocations, and users hold references to the tensors. So no `state_dict`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep._torch_compat import buffers_of
from lockstep.metrics import AverageMeterCollection
from lockstep.operator import TrainingOperator
from lockstep.operator.state_copy import StateCopy
from lockstep.sync import buffer_places, copy_buffers, put_buffers
from lockstep.sync.optimizer_inspection import inner_optimizers
from lockstep.tensor_copies import TensorCopies
from lockstep.worker.loop_behaviour import LoopBehaviour
from lockstep.worker.open_step import OpenStep, StepStart
from lockstep.worker.saved_gradients import SavedGradients
from lockstep.worker.settings_copy import LayersCopy, SettingsCopy, StepSettings
from lockstep.worker.user_state_copy import UserStateCopy

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from lockstep.operator.training_parts import TrainingParts
    from lockstep.sync import Synchroniser
    from lockstep.sync.buffer_broadcast import Copies
    from lockstep.worker.committed_counts import CommittedCounts
    from lockstep.worker.data_cursor import Cursor


class Rollback:
    """Takes an operator back to the beginning of the step that is not committed yet.

    Args:
        operator: after its `setup`.
        run: the models, optimizers and schedulers that it registered.
        tracked: the weights whose writes by a forward are undone, as they are at a call's begin.
        copies_weights: False where the state comes from a memory checkpoint instead: then only
            counts, buffers and what is `tracked` are copied.
    """

    def __init__(
        self,
        operator: TrainingOperator,
        run: TrainingParts,
        tracked: Callable[[], list[torch.Tensor]],
        *,
        copies_weights: bool,
    ) -> None:
        self._operator = operator
        self._run = run
        self._tracked = tracked
        self._copies_weights = copies_weights
        self._open: OpenStep | None = None
        self._is_intact = True
        self._layers: list[nn.Module] = []
        self._all_parameters: list[nn.Parameter] = []
        self._owners: list[nn.Module] = []  # of buffers
        self._buffers = TensorCopies()
        # A memory checkpoint holds the user's state, too, but not as an open window found it.
        copies_state = copies_weights or operator._lockstep.context.options.accumulate > 1
        copies_state = copies_state and UserStateCopy.is_needed(operator)
        self._user_state = UserStateCopy(operator) if copies_state else None
        self._parameters: list[torch.Tensor] = []
        self._loop = LoopBehaviour(operator, run)
        # The step with which a call of a user's `train_epoch` began; None for another loop.
        self._call_began: int | None = None
        # Gradients that an open window held when this pass over the data, or this call, began.
        self._window_gradients: SavedGradients | None = None
        self._was_unreduced_at_call = False
        self._settings_at_call: LayersCopy | None = None
        self._buffers_at_call = copy_buffers(())
        self._in_place_writes = operator._lockstep.in_place_writes
        # Whether optimizers may change something before any of their steps is seen.
        self._copies_before_batch = False
        operator._lockstep.put_buffers_back = self.put_buffers_back

    def begin_call(self, cursor: Cursor) -> None:
        """Find the modules' parameters and buffers, which takes too long for every step."""
        state = self._operator._lockstep
        began = state.committed
        if self._open is not None and cursor.has_open_window:
            # The window's first batches belong to the call before, which has counted them.
            start = self._open.start
            began = start.committed
            self._open.start = replace(
                start,
                call_steps=began - state.committed,
                call_samples=0,
                meters=AverageMeterCollection(),
            )
        # With a `train_epoch` of the user's own, an undo goes back to the beginning of the call.
        self._call_began = (
            began if self._operator._lockstep_overrides(TrainingOperator.train_epoch) else None
        )
        self._was_unreduced_at_call = not cursor.has_open_window and self.holds_unreduced_window
        self._parameters = self._tracked()
        self._layers = [layer for module in self._run.modules() for layer in module.modules()]
        self._all_parameters = list(self._run.parameters())
        self._owners = [layer for layer in self._layers if buffers_of(layer)]
        can_copy = self._loop.is_own and self._copies_weights
        self._copies_before_batch = can_copy and any(map(inner_optimizers, self._run.optimizers))
        self._settings_at_call = self._settings_before(cursor)
        self._buffers_at_call = self._copy_buffers_before(cursor)

    def _settings_before(self, cursor: Cursor) -> LayersCopy | None:
        """The settings to which an undo of the call goes back; see `_copy_buffers_before`."""
        if self._call_began is None:
            return None
        opened = self._open if cursor.has_open_window else None
        before = None if opened is None else opened.settings
        return before or self._settings()

    def _copy_buffers_before(self, cursor: Cursor) -> Copies:
        """The buffers to which an undo of the call goes back: before its open window, if any."""
        if self._call_began is None:
            return []
        places = buffer_places(self._run.modules())
        copies = copy_buffers(places)
        if cursor.has_open_window:
            self.put_buffers_back()
            now, copies = copies, copy_buffers(places)
            put_buffers(now)
        return copies

    def end_call(self) -> None:
        """Note that the call returns: no undo goes back to its beginning any more."""
        self._call_began = None
        if self._open is None:
            self._tell_server(None)

    def forget(self) -> None:
        """Drop the open step and all copies, because another state of the run is loaded."""
        self._open = self._call_began = self._window_gradients = None
        self._is_intact = True
        self._tell_server(None)

    @property
    def _sync(self) -> Synchroniser | None:
        return self._operator._lockstep.sync

    def _tell_server(self, undo_point: int | None) -> None:
        """Tell the parameter server, where there is one, to which step it may have to return."""
        sync = self._sync
        if sync is not None:
            began = self._call_began
            sync.set_undo_point(undo_point if began is None else began)

    def holds_unreduced_gradients(self, cursor: Cursor) -> bool:
        """Whether this rank holds gradients that are not reduced, which no other rank has."""
        waits = self._open is not None and self._sync is not None and self._sync.has_open_window
        return cursor.has_open_window or waits

    def put_call_start_buffers(self) -> None:
        """Restore the buffers of the call's beginning, before a state of then is loaded.

        No ``state_dict`` has those that are not persistent, and none takes one of another shape.
        """
        put_buffers(self._buffers_at_call)

    def restore_call_start(self) -> bool:
        """Restore the settings of the call's beginning, once the state of then is loaded.

        Returns False if this rank held unreduced gradients then, which no state holds.
        """
        if self._settings_at_call is not None:
            self._settings_at_call.restore()
        return not self._was_unreduced_at_call

    def begin_pass(self, cursor: Cursor) -> None:
        """Copy the gradients that an open window of the loop's own holds as a pass begins."""
        if cursor.has_open_window:
            return
        self._window_gradients = self.window_gradients()
        self._open = None

    def window_gradients(self) -> SavedGradients | None:
        """Copies of the gradients that the loop's own open window holds; None without a window."""
        sync = self._sync
        if self._open is None or sync is None:
            return self._earlier_gradients() or self._window_gradients
        return SavedGradients.take(self._run.parameters(), is_unreduced=sync.has_open_window)

    @property
    def holds_unreduced_window(self) -> bool:
        """Whether gradients of this rank alone wait in a window of the loop's own."""
        if self._open is not None and self._sync is not None:
            return self._sync.has_open_window
        return self._window_gradients is not None and self._window_gradients.is_unreduced

    def _earlier_gradients(self) -> SavedGradients | None:
        """Copies of earlier steps' gradients, where the loop adds to them; None where it clears."""
        sync = self._sync
        if sync is None or sync.has_open_window or not self._loop.may_reuse_gradients:
            return None
        if all(parameter.grad is None for parameter in self._run.parameters()):
            return None
        return SavedGradients.take(self._run.parameters(), is_unreduced=False)

    def restore_window_gradients(self, window_gradients: SavedGradients | None) -> bool:
        """Restore these gradients; False if parts of them are lost with another rank."""
        self._window_gradients = window_gradients
        if window_gradients is not None and not window_gradients.is_unreduced:
            window_gradients.restore(list(self._run.parameters()))
        return window_gradients is None or not window_gradients.is_unreduced

    def keep(self, cursor: Cursor, committed: CommittedCounts) -> None:
        """Before a batch: open a step and copy what it may change, unless a step is open."""
        state, has_own_loop = self._operator._lockstep, self._loop.is_own
        if self._open is not None:
            if not has_own_loop:
                self._open.settings = self._settings()
                self._open.groups.begin_batch()
            self._tell_server(self._open.start.committed)
            return
        # With several batches a step, the batches of an interrupted step are counted again.
        counts = has_own_loop or state.context.options.accumulate > 1
        start = StepStart(
            cursor.epoch,
            cursor.step,
            state.committed,
            committed.steps,
            committed.samples,
            _counts_to_keep(state.meters, committed) if counts else None,
            state.mark_counts(),
        )
        self._tell_server(state.committed)
        state.steps_taken_back = 0
        opened = OpenStep(
            start,
            buffers=[(own, *each) for own in self._owners for each in buffers_of(own).items()],
            rounds=self._loop.num_rounds,
            groups=StepSettings(self._changed_by_loss),
            settings=self._settings(),
            gradients=self._earlier_gradients(),
            copies=self._copy_all() if self._copies_before_batch else None,
        )
        if self._sync is not None:
            self._sync.watch_gradients()
        self._loop.begin_step()
        self._buffers.take(opened.filled_buffers)
        if self._user_state is not None:
            self._user_state.take()
        self._in_place_writes.take(self._parameters if opened.copies is None else [])
        # Last: Ctrl-C may come in between, and an open step must have all its copies.
        self._open = opened

    def _settings(self) -> LayersCopy:
        # A loop of the user's own may let schedulers step between the batches of a window.
        if self._loop.is_own:
            return SettingsCopy(self._run, self._all_parameters, self._layers)
        return LayersCopy(self._all_parameters, self._layers)

    @property
    def _changed_by_loss(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose settings a loss of the user's own may change in the default loop."""
        own_loss = self._operator._lockstep_overrides(TrainingOperator.compute_loss)
        return self._run.optimizers if own_loss and not self._loop.is_own else []

    def restore_layers(self) -> None:
        """After a step that counts although its loop has failed: leave no layer frozen."""
        # Behind the default loop's optimizer no loss is computed, so that what is frozen stays so.
        if self._loop.is_own and self._open is not None and self._open.settings is not None:
            self._open.settings.restore_layers()

    def settle(self, cursor: Cursor) -> None:
        """Close the step after a committed batch, unless gradients wait for further batches."""
        opened = self._open
        if opened is not None and not self._loop.is_own:
            opened.settings = None  # what the user freezes between two batches stays so
            opened.groups.end_batch()
        if cursor.has_open_window or (
            opened is not None and self._loop.holds_unused_gradients(opened)
        ):
            return
        if opened is not None:
            self._loop.learn_from(opened, self._num_steps(opened))
        self._open = self._window_gradients = None
        self._tell_server(None)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before an optimizer steps: copy what the step will change, or note that it is taken."""
        self._in_place_writes.find_writes()
        self._in_place_writes.note_step()
        self._loop.note_stepped(optimizer)
        opened = self._open
        if opened is None:
            return
        if self._loop.is_own:
            self._copy_before_step(opened, optimizer)
        self._loop.before_step(opened, optimizer)
        # An optimizer at a parameter server changes nothing here before the server has answered.
        if not self._steps_elsewhere(optimizer):
            opened.num_stepped += 1

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After a step: note that it has ended, or has happened in another process."""
        if self._open is not None:
            self._open.num_stepped += self._steps_elsewhere(optimizer)
            self._open.num_ended += 1

    def _steps_elsewhere(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._sync is not None and self._sync.has_state_of(optimizer)

    def _copy_before_step(self, opened: OpenStep, optimizer: torch.optim.Optimizer) -> None:
        if opened.copies is None and opened.stepped_at is None and self._copies_weights:
            is_elsewhere = any(map(self._steps_elsewhere, self._run.optimizers))
            if self._loop.may_communicate_after_optimizer or is_elsewhere:
                opened.copies = self._copy_all()
        if opened.copies is not None and not self._steps_elsewhere(optimizer):
            opened.copies.add(optimizer)  # it may be registered nowhere

    def _copy_all(self) -> StateCopy:
        """Copy weights, their averages, and the states of optimizers that step here."""
        run = self._run
        averages = [
            each for average in run.averages for each in (*average.parameters(), *average.buffers())
        ]
        here = [each for each in run.optimizers if not self._steps_elsewhere(each)]
        return StateCopy((*run.parameters(), *averages), here)

    @property
    def has_irreversible_step(self) -> bool:
        """Whether an optimizer has begun to step without a copy of the weights from before."""
        opened = self._open
        return opened is not None and self._has_uncopied_step(opened)

    def _has_uncopied_step(self, opened: OpenStep) -> bool:
        # A step counts as a change: fused kernels change weights without their version counters.
        return self._num_steps(opened) > 0 and opened.copies is None

    def _num_steps(self, opened: OpenStep) -> int:
        return opened.num_stepped - self._operator._lockstep.steps_taken_back

    @property
    def is_complete(self) -> bool:
        """Whether a step that cannot be undone has made as many optimizer steps as earlier steps.

        Then the step counts. The loop's code after its optimizers did not run; that code does not
        communicate.
        """
        opened = self._open
        if (
            opened is None
            or not self._has_uncopied_step(opened)
            or opened.num_ended < self._num_steps(opened)
            or self._loop.has_communicated_after_optimizer(opened)
        ):
            return False
        has_old = opened.gradients is not None or self._loop.has_reused_gradients(opened)
        return self._num_steps(opened) == self._loop.usual_steps and not has_old

    @property
    def has_missed_write(self) -> bool:
        """Whether a forward of the open step wrote to a weight of which there is no copy."""
        return self._open is not None and self._in_place_writes.has_missed()

    @property
    def is_settled(self) -> bool:
        """Whether no step is open, so that nothing will be undone."""
        return self._open is None

    @property
    def is_at_committed_step(self) -> bool:
        """Whether the state is that of the last committed step, and nothing waits for the next one.

        Known of the default loop alone, in which an optimizer steps after all communication.
        """
        is_known = self._is_intact and not self._loop.is_own
        return is_known and self._open is None and self.window_gradients() is None

    def undo(self, cursor: Cursor, committed: CommittedCounts) -> bool:
        """Undo the open step; False if weights have changed without a copy from before.

        Between two steps this only drops batches that were read ahead.
        """
        opened = self._open
        if opened is None:
            cursor.move_to(cursor.epoch, cursor.step)
            return True
        is_undone = self._is_intact = self._undo(opened, cursor, committed)
        # Last: after Ctrl-C in the undo, the step is still open and can be undone again.
        self._open = None
        return is_undone

    def _undo(self, opened: OpenStep, cursor: Cursor, committed: CommittedCounts) -> bool:
        self._restore_counts(opened.start, cursor, committed)
        self.put_buffers_back()
        for parameter in self._run.parameters():
            parameter.grad = None
        gathered = opened.gradients or self._window_gradients
        if not self.restore_window_gradients(gathered):
            return False
        # Weights and states of an optimizer that has stepped would be those after its step.
        has_stepped = self._has_uncopied_step(opened)
        is_lost = has_stepped or self._in_place_writes.has_missed()
        if gathered is None and self._loop.has_reused_gradients(opened):
            is_lost = self._loop.reuses_gradients = True
        if opened.copies is not None:
            opened.copies.restore()
        # Later: a forward writes before the optimizer's step, for which everything was copied.
        self._in_place_writes.restore()
        if self._user_state is not None:
            self._user_state.restore()
        opened.groups.restore()
        if opened.settings is not None:
            # Later: schedulers may have stepped between the batches of a window, before the copy.
            opened.settings.restore()
        if has_stepped:
            self._loop.expect_communication_after_optimizer()
        return not is_lost

    def put_buffers_back(self) -> None:
        """Restore the buffers' values from the beginning of the open step."""
        if self._open is None:
            return
        for owner, key, buffer in self._open.buffers:
            buffers_of(owner)[key] = buffer
        self._buffers.restore(self._open.filled_buffers)

    def put_window_start(self, states: list[dict[str, Any]]) -> None:
        """Put weights that forwards write, as before the open step, into the modules' `states`."""
        if self._open is not None:
            self._in_place_writes.put_into(self._run.plain_modules(), states)

    def put_window_settings(self, state: dict[str, Any], take: Callable[[Any], Any]) -> None:
        """Put settings that a step may change, as before the open step, into a state of the run."""
        if self._open is not None:
            self._open.groups.put_into(state, take)
            if isinstance(self._open.settings, SettingsCopy):
                self._open.settings.put_into(state, take)

    @property
    def user_state_before(self) -> UserStateCopy | None:
        """The user's own state from before the open step; None without either."""
        return None if self._open is None else self._user_state

    @property
    def written_parameters(self) -> list[int]:
        """Indices of the parameters that a batch writes to before an optimizer steps."""
        return [n for n, each in enumerate(self._run.parameters()) if each in self._in_place_writes]

    def expect_written_parameters(self, places: list[int]) -> None:
        """Take over from another rank which parameters a batch writes to, by their indices."""
        parameters = list(self._run.parameters())
        self._in_place_writes.expect(parameters[place] for place in places)

    def _restore_counts(self, start: StepStart, cursor: Cursor, committed: CommittedCounts) -> None:
        cursor.move_to(start.epoch, start.step)
        state = self._operator._lockstep
        state.committed = self._operator.global_step = start.committed
        if state.step_log is not None:
            state.step_log.rewind_to(start.committed)
        committed.steps, committed.samples = start.call_steps, start.call_samples
        if start.meters is not None:
            state.meters = start.meters
        state.restore_counts(start.further_counts)


def _counts_to_keep(
    meters: AverageMeterCollection, committed: CommittedCounts
) -> AverageMeterCollection:
    # Batches before the call's own first step do not count.
    return AverageMeterCollection() if committed.steps < 0 else meters.copy()
