# SPDX-License-Identifier: Apache-2.0
"""A worker's part of `verify()`: a few steps on a copy of the run, by all ranks and by one process.

The copy is a second worker beside the run's own: an operator whose `setup` runs again, loaders and
a process group of its own. The trial never changes the run, also when it fails; a rank that fails
closes the copy's group, which frees the others.

The one process takes the same global batches whole, through the operator's own loop and plain
autograd, without shards, weights, buckets or collectives. It starts every step from the workers'
state, so that a difference is one of this step.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep.batch_dependent_layers import freeze_batch_dependent_layers, is_local_batch_norm
from lockstep.errors import NotAvailableError
from lockstep.no_dropout_mode import NoDropoutMode
from lockstep.operator.buffer_values import buffer_values, put_buffer_values
from lockstep.operator.rank_context import ONE_PROCESS, ONE_PROCESS_BY_SHARD
from lockstep.randomness import preserve_rng_state
from lockstep.worker.loop_run import LoopRequest
from lockstep.worker.optimizer_recorder import OptimizerRecorder, StepRecord
from lockstep.worker.remote_method import Communication, OnFailure, remote_method

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lockstep.group import Group
    from lockstep.operator.buffer_values import BufferValues
    from lockstep.worker.worker import Worker

_DRAWS: Final = (
    "the step draws random numbers, or uses the statistics of its batch, in a way that cannot be"
    " turned off"
)
_BY_SHARD: Final = (
    f"{_DRAWS}: the one process computed shard after shard, each with its own numbers, and a"
    " loss that is no mean over samples would not show"
)
_RANKS_ONLY: Final = (
    f"{_DRAWS}: the workers were held against each other only, not against one process"
)
_MP_POLICY: Final = (
    "the model computes by an mp_policy, which one process does not know: the workers were held"
    " against each other only"
)
_DROPOUT: Final = "dropout is off in what calls it as a function, attention for one"


@dataclass(frozen=True)
class Trial:
    """The steps of a trial on one rank.

    Attributes:
        steps: the records of its optimizers' steps; None if equal to rank 0's bit for bit.
        truth: the records of the one process; on rank 0 only.
        is_comparable: False if one process cannot compute what the workers compute.
        inconclusive: why the one process did not take the global batch whole; empty if it did.
        notes: the layers and functions that were turned off.
    """

    steps: list[StepRecord] | None
    truth: list[StepRecord] | None
    is_comparable: bool
    inconclusive: str
    notes: list[str]


@remote_method(Communication.OWN_GROUP, OnFailure.REPEAT)
def verify(worker: Worker, num_steps: int) -> Trial:
    """Run `num_steps` optimizer steps on copies of `worker`.

    Collective:
        Every rank of the run, over a group of its own.

    Raises:
        NotAvailableError: no optimizer stepped.
        An error of the operator's own; the run is as it was.
    """
    with preserve_rng_state(), ExitStack() as ends:
        workers = _TrialCopy(worker.make_copy(worker.spec, alone=False), worker.operator.device)
        ends.callback(workers.copy.stop)
        put_buffer_values(workers.copy.run, buffer_values(worker.run), worker.operator.device)
        workers.copy.load_state(worker.own_state_dict())
        # The state of a user's own class may differ between ranks; the one process gets rank 0's.
        process = _OneProcessReference(worker) if worker.rank == 0 else None
        if process is not None:
            ends.callback(process.end)
        steps: list[StepRecord] = []
        truth: list[StepRecord] = []
        for _ in range(num_steps):
            state = workers.copy.state_dict()
            buffers = buffer_values(workers.copy.run, torch.clone)
            steps.append(workers.step())
            if process is not None:
                truth.append(process.step(state, buffers))
        if not any(step.gradients for step in steps):
            raise _no_step(worker, num_steps)
        digests = workers.group.exchange([step.digest() for step in steps])
        is_rank_0 = process is not None
        return Trial(
            steps=steps if is_rank_0 or digests[worker.rank] != digests[0] else None,
            truth=truth if is_rank_0 else None,
            is_comparable=process is None or process.is_comparable,
            inconclusive="" if process is None else process.inconclusive,
            notes=workers.notes,
        )


class _TrialCopy:
    """A copy of a worker without dropout, and the recorder of its optimizers' steps."""

    def __init__(self, copy: Worker, device: torch.device) -> None:
        self.copy = copy
        try:
            with copy.as_default_group():
                hooks = copy.build_as_trial(device)
            run = copy.run
            self._pinned = [
                note
                for module in run.plain_modules()
                for note in freeze_batch_dependent_layers(module)
            ]
            self._dropout = NoDropoutMode()
            self._recorder = OptimizerRecorder(copy.operator, run, hooks)
        except BaseException:
            copy.stop()
            raise

    @property
    def group(self) -> Group:
        """The group of the copies."""
        return self.copy.operator._lockstep.context.group

    @property
    def notes(self) -> list[str]:
        """The layers and functions whose randomness was turned off."""
        return [*self._pinned, *[_DROPOUT] * self._dropout.was_needed]

    @property
    def depends_on_split(self) -> bool:
        """Whether a layer normalises by its batch and has no running statistics to use instead."""
        return any(
            is_local_batch_norm(layer) and layer.running_mean is None
            for module in self.copy.run.modules()
            for layer in module.modules()
        )

    @property
    def can_run_by_shard(self) -> bool:
        """Whether the loop computes the same if it takes the global batch shard by shard."""
        operator = self.copy.operator
        return not operator._lockstep_overrides_loop() and not operator.joint_loss

    def step(self) -> StepRecord:
        """Train on one accumulation window: one optimizer step of the default loop."""
        with self.copy.as_default_group(), self._dropout:
            while True:
                self.copy.train(LoopRequest("train", 1, False, {}))
                if not self.copy.cursors["train"].has_open_window:
                    return self._recorder.take()


class _OneProcessReference:
    """The reference: one process that takes the global batch whole, or if necessary by shards."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.inconclusive = ""
        self.is_comparable = True
        self._trial = self._open_copy(ONE_PROCESS)
        self._is_whole = True
        if worker.run.sync_options.mp_policy is not None:
            self.is_comparable, self.inconclusive = False, _MP_POLICY

    def _open_copy(self, way: str) -> _TrialCopy:
        spec = self._worker.spec
        options = replace(spec.options, sync=way, reproducible=False)
        alone = replace(spec, num_workers=1, options=options)
        return _TrialCopy(self._worker.make_copy(alone, alone=True), self._worker.operator.device)

    def step(self, state: Mapping[str, Any], buffers: BufferValues) -> StepRecord:
        try:
            recorded = self._step_from(state, buffers)
            depends = recorded.has_drawn or self._trial.depends_on_split
            if not depends or not self._is_whole or not self.is_comparable:
                return recorded
            if not self._trial.can_run_by_shard:
                self.is_comparable = False
                self.inconclusive = _RANKS_ONLY
                return recorded
            self._trial.copy.stop()
            self._trial, self._is_whole = self._open_copy(ONE_PROCESS_BY_SHARD), False
            self.inconclusive = _BY_SHARD
            return self._step_from(state, buffers)
        except Exception as error:
            error.add_note("raised while one process computed the workers' global batch")
            raise

    def _step_from(self, state: Mapping[str, Any], buffers: BufferValues) -> StepRecord:
        put_buffer_values(self._trial.copy.run, buffers, self._worker.operator.device)
        self._trial.copy.load_state(state)
        return self._trial.step()

    def end(self) -> None:
        self._trial.copy.stop()


def _no_step(worker: Worker, num_steps: int) -> NotAvailableError:
    return NotAvailableError(
        "there is nothing to verify: no registered optimizer stepped",
        where=type(worker.operator).__name__,
        got=f"{num_steps} global batches",
        cause="the operator's own loop steps less often, or steps an optimizer that it did not"
        " register",
        fix="verify(num_steps=...) with more global batches, or register every optimizer",
    )
