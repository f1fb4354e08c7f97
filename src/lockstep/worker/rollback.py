# SPDX-License-Identifier: Apache-2.0
"""What a step changes before it is committed, as it was when the step began.

A step that is interrupted, by a peer's death, by an error or by Ctrl-C, is computed again. In the
default loop nothing but buffers (running statistics) has changed when a peer dies, for the
optimizer steps when everything has been communicated; an error that comes behind that step leaves
weights that cannot be had back: then the step counts, if it is complete. A `train_batch` of the
user's own may communicate after an optimizer has stepped (two models with two optimizers): then the
weights and the optimizers' state are copied before the first of them steps. Whether it does is
learned from its first batches, which are copied in any case: until each optimizer has stepped, for
one may do so in few batches only. Optimizers that step elsewhere, at a parameter server, are told
to which step they may have to go back, and do so there; a step of theirs communicates, so that the
weights are copied here before each. A forward may write to weights in any loop; see `written`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from lockstep._torch_compat import buffers_of
from lockstep.lazy_compiler import outside_graphs
from lockstep.metrics import AverageMeterCollection
from lockstep.operator.state_copy import StateCopy
from lockstep.sync import copy_over, overwrite
from lockstep.worker.in_place_writes import InPlaceWriteTracker
from lockstep.worker.saved_gradients import SavedGradients

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lockstep.operator import TrainingOperator
    from lockstep.operator.training_parts import TrainingParts
    from lockstep.sync import Synchroniser
    from lockstep.worker.cursor import Cursor, Tally


_STEPS_TO_LEARN: Final = 3


@dataclass(frozen=True)
class Mark:
    """Where a step began: position in the data, steps of the run, counts of the call."""

    epoch: int
    step: int
    committed: int
    tally_steps: int
    tally_samples: int
    meters: Any
    measures: Any


@dataclass
class OpenStep:
    """A step from its first batch on, until it is committed.

    Attributes:
        mark: where it began.
        buffers: the modules', by their places; copies of their values are kept beside it.
        rounds: reductions that had happened when it began.
        settings: what schedulers change; None in the default loop, where nothing but buffers
            changes before all is communicated.
        stepped_at: reductions that had happened when its first optimizer stepped; None: none has.
        num_stepped: steps of optimizers that have begun since.
        everything: copies that were made then.
        gradients: those that earlier steps left, where the loop adds to them.
    """

    mark: Mark
    buffers: list[Any]
    rounds: int
    settings: _Settings | None
    stepped_at: int | None = None
    num_stepped: int = 0
    everything: StateCopy | None = None
    gradients: SavedGradients | None = None


class Rollback:
    """Takes an operator back to the beginning of the step that is not committed yet.

    Args:
        operator: after its `setup`.
        run: what it registered.
    """

    def __init__(self, operator: TrainingOperator, run: TrainingParts) -> None:
        self._operator = operator
        self._run = run
        self._open: OpenStep | None = None
        self._places: list[tuple[nn.Module, str]] = []
        self._kept: list[torch.Tensor] = []
        self._parameters: list[nn.Parameter] = []
        # None: not known yet.
        self._steps_early: bool | None = None
        self._stepped_once: set[int] = set()
        self._usual_steps = 0
        # Of a `train_epoch` of the user's own all is undone, and nothing of another loop's call.
        self._call_began: int | None = None
        self._carried: SavedGradients | None = None
        self._at_call: SavedGradients | None = None
        # Whether a loop of the user's own adds to gradients that an optimizer has used: learned in
        # its first steps, for which they are copied in any case.
        self._adds_up = False
        self._steps_to_learn = _STEPS_TO_LEARN if operator._brings_own_loop() else 0
        self._written = InPlaceWriteTracker(run.optimizers)
        self._has_own_loop = (
            # What a user does after a step may communicate, and may fail, as a loop of one's own.
            operator._brings_own_loop() or operator._brings("after_step")
        )
        operator._lockstep.put_buffers_back = self.put_buffers_back
        before = outside_graphs(lambda each, *_: self._about_to_step(each))
        after = outside_graphs(lambda each, *_: self._has_stepped(each))
        self._handles: list[Any] = []
        for each in run.optimizers:
            self._handles += [each.register_step_pre_hook(before)]
            self._handles += [each.register_step_post_hook(after)]

    def close(self) -> None:
        """Take the hooks off the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._written.close()

    def begin_call(self, cursor: Cursor) -> None:
        """Look where the modules' parameters and buffers are: too dear for every step."""
        stage = self._operator._lockstep
        began = stage.committed
        if self._open is not None and cursor.has_open_window:
            # Its first batches belong to the call before, which has counted them.
            mark, fresh = self._open.mark, AverageMeterCollection()
            began = mark.committed
            steps = began - stage.committed
            self._open.mark = replace(mark, tally_steps=steps, tally_samples=0, meters=fresh)
        # Of a `train_epoch` of the user's own the whole call is undone.
        self._call_began = began if self._operator._brings("train_epoch") else None
        self._at_call = None if cursor.has_open_window else self.carried()
        self._parameters = list(self._run.parameters())
        self._places = [
            (owner, key)
            for module in self._run.modules()
            for owner in module.modules()
            for key, buffer in buffers_of(owner).items()
            if buffer is not None
        ]

    def end_call(self) -> None:
        """What has happened stays."""
        self._call_began = None
        if self._open is None:
            self._tell(None)

    def forget(self) -> None:
        """Another state is about to be put in the place of this one."""
        self._open = self._call_began = self._carried = None
        self._tell(None)

    @property
    def _sync(self) -> Synchroniser | None:
        return self._operator._lockstep.sync

    @property
    def _rounds(self) -> int:
        return 0 if self._sync is None else self._sync.rounds

    def _tell(self, may_go_back_to: int | None) -> None:
        """Tell who steps elsewhere; after a recovery it is somebody else."""
        sync = self._sync
        if sync is not None:
            began = self._call_began
            sync.may_go_back_to(may_go_back_to if began is None else began)

    def holds_own_part(self, cursor: Cursor) -> bool:
        """There are gradients that this rank alone knows of: they have not been reduced."""
        waits = self._open is not None and self._sync is not None and self._sync.has_open_window
        return cursor.has_open_window or waits

    def begin_again(self) -> bool:
        """The call begins anew, from the state at its start; False if gradients of it are lost."""
        return self.carry(self._at_call)

    def begin_pass(self, cursor: Cursor) -> None:
        """What a window of the loop's own has gathered is kept, and not computed again."""
        if cursor.has_open_window:
            return
        self._carried = self.carried()
        self._open = None

    def carried(self) -> SavedGradients | None:
        """Gradients that a window of the loop's own holds between two passes; None without one."""
        sync = self._sync
        if self._open is None or sync is None:
            return self._left() or self._carried
        return SavedGradients.of(self._run.parameters(), is_torn=sync.has_open_window)

    def _left(self) -> SavedGradients | None:
        """Gradients of earlier steps, where the loop adds to them; None where it clears them."""
        sync, may_add = self._sync, self._adds_up or self._steps_to_learn > 0
        if sync is None or sync.has_open_window or not may_add:
            return None
        if all(parameter.grad is None for parameter in self._run.parameters()):
            return None
        return SavedGradients.of(self._run.parameters(), is_torn=False)

    def carry(self, carried: SavedGradients | None) -> bool:
        """Go on with these gradients; False if they are not to be had any more."""
        self._carried = carried
        if carried is not None and not carried.is_torn:
            carried.put_into(self._run.parameters())
        return carried is None or not carried.is_torn

    def keep(self, cursor: Cursor, tally: Tally) -> None:
        """A batch is about to be computed on; the first one of a step, unless one is open."""
        if self._open is not None:
            self._tell(self._open.mark.committed)
            return
        stage, has_own_loop = self._operator._lockstep, self._has_own_loop
        # Several batches a step: those of an interrupted one are counted again.
        counts = has_own_loop or stage.setting.options.accumulate > 1
        mark = Mark(
            cursor.epoch,
            cursor.step,
            stage.committed,
            tally.steps,
            tally.samples,
            _counts_to_keep(stage.meters, tally) if counts else None,
            stage.measures.mark(),
        )
        self._tell(stage.committed)
        stage.steps_taken_back = 0
        opened = OpenStep(
            mark,
            buffers=[buffers_of(owner)[key] for owner, key in self._places],
            rounds=self._rounds,
            # A loop of the user's own may let schedulers step between the batches of a window.
            settings=_Settings(self._run) if has_own_loop else None,
            gradients=self._left(),
        )
        if self._sync is not None:
            self._sync.watch_gradients()
        copy_over(opened.buffers, self._kept)
        self._written.keep(self._parameters)
        # Last: Ctrl-C may come in between, and what is open has all its copies.
        self._open = opened

    def settle(self, cursor: Cursor) -> None:
        """A batch is committed, and its step with it, unless gradients wait for further ones."""
        opened = self._open
        if cursor.has_open_window or (opened is not None and self._gathers(opened)):
            return
        if opened is not None and opened.stepped_at is not None:
            if self._rounds > opened.stepped_at:
                self._steps_early = True
            elif len(self._stepped_once) == len(self._run.optimizers):
                self._steps_early = bool(self._steps_early)
        if opened is not None:
            self._learn(opened)
            self._usual_steps = max(self._usual_steps, self._taken(opened))
        self._open = self._carried = None
        self._tell(None)

    def _learn(self, opened: OpenStep) -> None:
        self._adds_up = self._adds_up or self._has_added(opened)
        self._steps_to_learn = max(0, self._steps_to_learn - 1)

    def _has_added(self, opened: OpenStep) -> bool:
        """Gradients of earlier steps have been used in this one."""
        sync = self._sync
        if not self._has_own_loop or sync is None:
            return False
        # An optimizer that steps without a round before uses what is there.
        stepped_on_old = sync.needs_guard and opened.stepped_at == opened.rounds
        return sync.has_added or stepped_on_old

    def _gathers(self, opened: OpenStep) -> bool:
        """Gradients have come that no optimizer has consumed."""
        if not self._operator._brings_own_loop() or self._sync is None:
            return False  # the default loop's windows are the cursor's
        waits = opened.stepped_at is None and self._rounds > opened.rounds
        return waits or self._sync.has_open_window

    def _about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        opened = self._open
        if self._has_own_loop:
            self._keep_everything(optimizer)
        # One that steps elsewhere moves nothing here before it was answered.
        if opened is not None and not self._steps_elsewhere(optimizer):
            opened.num_stepped += 1

    def _has_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._open is not None and self._steps_elsewhere(optimizer):
            self._open.num_stepped += 1

    def _steps_elsewhere(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._sync is not None and self._sync.has_state_of(optimizer)

    def _keep_everything(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped_once.add(id(optimizer))
        opened = self._open
        if opened is None or opened.stepped_at is not None:
            return
        optimizers = self._run.optimizers
        here = [each for each in optimizers if not self._steps_elsewhere(each)]
        if self._steps_early is not False or len(here) < len(optimizers):
            opened.everything = _everything(self._run, here)
        opened.stepped_at = self._rounds

    @property
    def is_past_undoing(self) -> bool:
        """An optimizer has begun to step, and there is no copy of what it changes."""
        opened = self._open
        return opened is not None and self._has_moved(opened)

    def _has_moved(self, opened: OpenStep) -> bool:
        # Whether weights have changed cannot be asked: fused kernels raise no version counter.
        return self._taken(opened) > 0 and opened.everything is None

    def _taken(self, opened: OpenStep) -> int:
        return opened.num_stepped - self._operator._lockstep.steps_taken_back

    @property
    def is_complete(self) -> bool:
        """There is no way back, and as many optimizers have stepped as in any step before.

        What a loop of the user's own does behind them is not known, and communicates nothing.
        """
        opened = self._open
        if opened is None or not self._has_moved(opened) or self._rounds != opened.stepped_at:
            return False
        has_old = opened.gradients is not None or self._has_added(opened)
        return self._taken(opened) == self._usual_steps and not has_old

    @property
    def is_settled(self) -> bool:
        """What has happened is not taken back any more."""
        return self._open is None

    def undo(self, cursor: Cursor, tally: Tally) -> bool:
        """Go back; False if the weights have moved and there is no copy of them.

        Between steps there is nothing to undo but what was read ahead.
        """
        opened = self._open
        if opened is None:
            cursor.move_to(cursor.epoch, cursor.step)
            return True
        is_undone = self._undo(opened, cursor, tally)
        # Last: who is interrupted in it begins it anew.
        self._open = None
        return is_undone

    def _undo(self, opened: OpenStep, cursor: Cursor, tally: Tally) -> bool:
        self._count_from(opened.mark, cursor, tally)
        self.put_buffers_back()
        for parameter in self._run.parameters():
            parameter.grad = None
        gathered = opened.gradients or self._carried
        if not self.carry(gathered):
            return False
        # Of an optimizer that has stepped weights and state would be those of after.
        has_stepped = self._has_moved(opened)
        is_lost = has_stepped or self._written.has_missed()
        if gathered is None and self._has_added(opened):
            is_lost = self._adds_up = True
        if opened.everything is not None:
            opened.everything.put_back()
        # After it: a forward that writes comes before the step for which everything is copied.
        self._written.put_back()
        if opened.settings is not None:
            # After it: schedulers may have stepped between the batches of a window.
            opened.settings.put_back()
        if has_stepped and self._has_own_loop:
            self._steps_early = True
        return not is_lost

    def put_buffers_back(self) -> None:
        """Give buffers the values that they had when the open step began."""
        if self._open is None:
            return
        for (owner, key), buffer in zip(self._places, self._open.buffers, strict=True):
            buffers_of(owner)[key] = buffer
        overwrite(self._open.buffers, self._kept)

    @property
    def written(self) -> list[int]:
        """Which parameters a batch writes before an optimizer steps, by their numbers."""
        return [n for n, each in enumerate(self._run.parameters()) if each in self._written]

    def expect_written(self, places: list[int]) -> None:
        """Others have learned which ones they are."""
        parameters = list(self._run.parameters())
        self._written.expect(parameters[place] for place in places)

    def _count_from(self, mark: Mark, cursor: Cursor, tally: Tally) -> None:
        cursor.move_to(mark.epoch, mark.step)
        stage = self._operator._lockstep
        stage.committed = self._operator.global_step = mark.committed
        if stage.step_log is not None:
            stage.step_log.back_to(mark.committed)
        tally.steps, tally.samples = mark.tally_steps, mark.tally_samples
        if mark.meters is not None:
            stage.meters = mark.meters
        stage.measures.back_to(mark.measures)


def _counts_to_keep(meters: AverageMeterCollection, tally: Tally) -> AverageMeterCollection:
    # Before the call's own first step nothing counts.
    return AverageMeterCollection() if tally.steps < 0 else meters.copy()


class _Settings:
    """What schedulers change: their own state, and the optimizers' learning rates."""

    def __init__(self, run: TrainingParts) -> None:
        self._run = run
        self._schedulers = [copy.deepcopy(each.state_dict()) for each in run.schedulers]
        self._groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in groups]
            for groups in (optimizer.param_groups for optimizer in run.optimizers)
        ]

    def put_back(self) -> None:
        for scheduler, state in zip(self._run.schedulers, self._schedulers, strict=True):
            scheduler.load_state_dict(state)
        for optimizer, groups in zip(self._run.optimizers, self._groups, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                for new in group.keys() - settings.keys() - {"params"}:
                    del group[new]
                group.update(settings)


def _everything(run: TrainingParts, optimizers: list[torch.optim.Optimizer]) -> StateCopy:
    """Weights, their averages, and the states of schedulers and of these optimizers."""
    averages = [
        each for average in run.averages for each in (*average.parameters(), *average.buffers())
    ]
    return StateCopy((*run.parameters(), *averages), (*optimizers, *run.schedulers))
