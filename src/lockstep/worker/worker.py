# SPDX-License-Identifier: Apache-2.0
"""`Worker`: one rank of a run, with its group, its operator and its position in the data."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from lockstep.errors import ConfigurationError, PeerLostError
from lockstep.group import Group
from lockstep.operator.mixed_tensors import explain_mixed_tensors
from lockstep.operator.non_finite_check import add_non_finite_checks
from lockstep.operator.optimizer_comparison import compare_optimizers, describe_states
from lockstep.operator.optimizer_step_hooks import OptimizerStepHooks, add_step_listeners
from lockstep.operator.rank_context import RankContext
from lockstep.operator.registered_schedulers import update_schedulers
from lockstep.operator.registration import conclude_setup, registered_parts
from lockstep.randomness import derive_seed, preserve_rng_state
from lockstep.worker.checkpoint_snapshot import SnapshotTaker
from lockstep.worker.dataset_switch import DatasetSwitch
from lockstep.worker.determinism import deterministic_mode
from lockstep.worker.device import pick_device
from lockstep.worker.gloo_sockets import GlooSockets
from lockstep.worker.loop_run import LoopRequest, LoopRun
from lockstep.worker.memory_checkpoint import MemoryCheckpoints, tracked_weights
from lockstep.worker.open_step import Undone
from lockstep.worker.process_group import (
    Rendezvous,
    form_group,
    form_group_of_one,
    form_second_group,
    leave_group,
    use_as_default_group,
)
from lockstep.worker.program_sources import source_digests
from lockstep.worker.remote_method import Communication, OnFailure, remote_method
from lockstep.worker.report import StartReport
from lockstep.worker.rollback import Rollback
from lockstep.worker.run_audit import RunAudit
from lockstep.worker.spec import config_for
from lockstep.worker.state_access import StateAccess
from lockstep.worker.step_records import open_step_log
from lockstep.worker.thread_limit import ThreadLimit
from lockstep.worker.torch_profiler import discard_trace

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    import torch
    import torch.distributed as dist

    from lockstep.data import RayBatches
    from lockstep.operator import TrainingOperator
    from lockstep.worker.report import Report
    from lockstep.worker.spec import WorkerSpec
    from lockstep.worker.survivor_state import SurvivorState

_CLOSING_S: Final = 1.0


class Worker(StateAccess):
    """Rank `rank` of a run. An engine calls its methods, one at a time.

    The driver calls the methods that `remote_method` decorates, and decorated functions of other
    modules (`join`, `verify`, ...). Only `request_leave` and `break_group`, and what
    `lockstep.worker.progress` and `lockstep.worker.worker_status` read, may be called from another
    thread meanwhile.

    Attributes:
        number: its number in the driver's messages, which stays while its rank may change.
        cursors: the position in the data, by purpose.
        num_batches_to_recompute: batches that earlier calls have counted, and that the next call
            computes again first.
        is_warm: its process has committed a step, so that its slow first step is over.
        has_state: it has the state of the run; a spare gets the state when it joins.
        loop_run: the latest `train` or `validate`.
        snapshots: takes copies of its state for checkpoints.
        incoming: its part of a state that is about to be loaded, if the driver has sent it.
        before_call: the state before a call of a user's `train_epoch`; None with `memory`.
        memory: its memory checkpoints; None where every rank has the whole state.
        survivor: how far the run had come when it went back to a memory checkpoint; None once the
            steps since then have been computed again.
        step_hooks: on the steps of its optimizers; None before `setup` has ended.
    """

    def __init__(self, spec: WorkerSpec, rank: int, local_rank: int, is_here: bool = False) -> None:
        self.spec = spec
        self.number = self.rank = rank
        self.local_rank, self._is_here = local_rank, is_here
        self._group: dist.ProcessGroup | None = None
        self._group_handle: Group | None = None
        self._rendezvous: Rendezvous | None = None
        self._sockets = GlooSockets()
        self._num_copies = 0
        self._operator = None
        self.cursors = {}
        self._dataset_switch = DatasetSwitch()
        self._before_load = None
        self.before_call: dict[str, Any] | None = None
        self.call_number = -1
        self.num_batches_to_recompute = 0
        self._rollback = None
        self.memory: MemoryCheckpoints | None = None
        self.survivor: SurvivorState | None = None
        self._is_asked_to_leave = False
        self.is_warm = False
        self._closing: threading.Thread | None = None
        self.step_hooks: OptimizerStepHooks | None = None
        self._threads = ThreadLimit()
        self.has_state = False
        self.loop_run: LoopRun | None = None
        self.snapshots = SnapshotTaker(self)
        self.incoming = None
        self._audit = RunAudit(spec)
        self.on_commit: Callable[[], None] | None = None
        self.before_next_batch: Callable[[], None] | None = None
        self.before_first_collective: Callable[[], None] | None = None

    # ------------------------------------------------------------------------- life and death

    @remote_method(Communication.RUN_GROUP, OnFailure.RAISE)
    def start(self, rendezvous: Rendezvous | None) -> StartReport:
        """Form the group with the peers, build the operator, run its `setup`."""
        device = self._begin_process()
        if rendezvous is not None:
            if self.before_first_collective is not None:
                self.before_first_collective()
            self.join_group(rendezvous, device)
        self.attach_audit(0)
        with self._audit.during_setup():
            self._build_operator(device)
        self.has_state = True
        if self.memory is not None:
            self.memory.take_between_calls()
        return self._start_report(device)

    @remote_method(Communication.NONE, OnFailure.RAISE)
    def stand_by(self) -> StartReport:
        """Build the operator of a spare: `setup` runs, without peers."""
        device = self._begin_process()
        if self.spec.keeps_memory_checkpoints:
            self._group = form_group_of_one(device)  # `register` cuts the model into shards
        self._build_operator(device, is_spare=True)
        return self._start_report(device)

    @remote_method(Communication.NONE, OnFailure.REPEAT, is_timed=True)
    def ping(self) -> None:
        """Return at once, as a sign of life."""

    @property
    def is_built(self) -> bool:
        """Whether there is an operator: after `start` or `stand_by`, and before `stop`."""
        return self._operator is not None

    def _begin_process(self) -> torch.device:
        spec = self.spec
        if spec.threads is not None:
            self._threads.set(spec.threads)
        device = pick_device(spec.use_gpu, self.local_rank, self._is_here)
        if spec.initialization_hook is not None:
            spec.initialization_hook()
        return device

    def _start_report(self, device: torch.device) -> StartReport:
        steps = {purpose: cursor.source.steps_per_epoch for purpose, cursor in self.cursors.items()}
        sync = self.operator._lockstep.sync
        return StartReport(
            os.getpid(),
            str(device),
            steps,
            units=() if sync is None else sync.units,
            has_schedulers=bool(self.run.schedulers),
            changes_in_validation=self.operator._lockstep_changes_in_validation(),
            sources=source_digests(self.spec.operator_cls),
        )

    def _build_operator(
        self, device: torch.device, *, is_trial: bool = False, is_spare: bool = False
    ) -> OptimizerStepHooks:
        spec = self.spec
        if self._group_handle is None:
            self._group_handle = Group(self._group)
        context = RankContext(
            world_rank=self.rank,
            world_size=spec.num_workers,
            local_rank=self.local_rank,
            device=device,
            group=self._group_handle,
            # A spare gets its shards in `join`.
            shard_assignment=self.make_shard_assignment(
                spec.num_shards, spec.seed, 0 if is_spare else self.rank
            ),
            options=spec.options,
            is_trial=is_trial,
            is_spare=is_spare,
            server_address=self._rendezvous.server_address
            if self._rendezvous is not None
            else None,
        )
        config = config_for(spec, context.shard_assignment.shards[0])
        operator = spec.operator_cls(config, context)
        if "_lockstep" not in vars(operator):
            raise ConfigurationError(
                f"{spec.operator_cls.__name__}.__init__ does not call TrainingOperator's",
                fix="super().__init__(config, context) at its beginning; or leave __init__ out, and"
                " write setup(self, config)",
            )
        # Set before `setup`, so that `stop` frees what a failing `setup` registered.
        self._operator = operator
        with preserve_rng_state(derive_seed(spec.seed, "setup")), explain_mixed_tensors(operator):
            returned = cast("Any", operator).setup(operator.config)
        run = registered_parts(operator)
        conclude_setup(operator, run, returned)
        if not (is_trial or is_spare):
            self.snapshots.refuse_uncollectable_states()
        open_step_log(operator, run, spec)
        if run.sync is not None and spec.num_workers > 1 and not is_spare:
            # `setup` may have changed weights or states after `register` on some ranks only.
            run.sync.agree_on_values()
            is_served = spec.options.sync == "parameter_server"
            compare_optimizers(context.group, run, [] if is_served else describe_states(run))
            operator._lockstep.compare_hardware()
        self._open_loaders(operator)
        hooks = self.step_hooks = OptimizerStepHooks(operator, run)
        if not is_trial:  # first: what follows must not see a step that this one refuses
            add_non_finite_checks(operator, run, hooks)
        if spec.can_go_back and not is_trial:
            if spec.keeps_memory_checkpoints:
                self.memory = MemoryCheckpoints(self)
            tracked = partial(tracked_weights, self)
            self._rollback = Rollback(operator, run, tracked, copies_weights=self.memory is None)
            hooks.add(before=self._rollback.before_step, after=self._rollback.after_step)
        add_step_listeners(operator, hooks)
        return hooks

    def join_group(self, rendezvous: Rendezvous, device: torch.device) -> Group:
        """Form the group of all ranks, and stay in it until `leave`.

        Collective:
            Every rank.
        """
        self._rendezvous = rendezvous
        self._sockets = GlooSockets(rendezvous.generation)
        with self._sockets.record_new_sockets():
            self._group = form_group(rendezvous, self.rank, self.spec.num_workers, device)
        self._group_handle = Group(self._group)
        self._sockets.find_peer_sockets(self._group_handle)
        return self._group_handle

    def break_group(self, generation: int) -> None:
        """End all waits in the group of `generation`, because a peer will never answer."""
        connections = self._sockets  # of one generation, even if another one forms meanwhile
        if connections.generation == generation:
            connections.shut_down()

    def leave(self) -> None:
        """Detach from the group and close it: ranks that wait for this one get an error."""
        if self.memory is not None:
            self._before_load = None  # its rows are those of this group's shards
        self._audit.detach()
        run = None if self._operator is None else self._operator._lockstep.registered
        if run is not None:
            run.leave_group()
        if self._group_handle is not None:
            self._group_handle.close()
        if self._group is not None:
            held, self._group = [self._group], None
            self._sockets.forget()
            self._closing = leave_group(held)

    @remote_method(Communication.UNKNOWN, OnFailure.RAISE)
    def stop(self) -> None:
        """Close the loaders, the group and the operator; the loaders' worker processes end."""
        self._close_loaders()
        self.leave()
        if self._closing is not None:
            self._closing.join(_CLOSING_S)  # no socket stays open after the trainer's end
        if self._operator is not None and self._operator._lockstep.sync is not None:
            self._operator._lockstep.sync.detach()
        # In the driver's process the optimizer may be the user's own, and outlives the trainer.
        if self.step_hooks is not None:
            self.step_hooks.close()
        self._operator = self.loop_run = None
        discard_trace()
        self._threads.release()

    # -------------------------------------------------------------------- another generation

    @property
    def has_begun_to_step(self) -> bool:
        """Whether an uncommitted step, or an epoch's end, has begun that cannot be undone."""
        ends_epoch = self.loop_run is not None and self.loop_run.cursor.has_scheduled
        return ends_epoch or (self._rollback is not None and self._rollback.has_irreversible_step)

    def request_leave(self) -> None:
        """Make the running call end before its next batch, so that the group can form anew."""
        self._is_asked_to_leave = True

    def _before_batch(self) -> None:
        """Between two batches: copy counts, take a snapshot if one is due, leave if asked to."""
        if self.before_next_batch is not None:
            self.before_next_batch()
        if self.loop_run is not None:
            self.loop_run.note_counts()
            if self.loop_run.request.purpose == "train":
                is_saved = self.snapshots.before_batch(self.loop_run.committed)
                if self.memory is not None:
                    is_settled = self.snapshots.is_settled(self.loop_run.committed)
                    progress = self.loop_run.progress
                    self.memory.before_batch(progress, is_settled=is_settled, is_saved=is_saved)
        self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Between two batches, end the call if the driver asked for it by `request_leave`, or has
        broken the group: no step over it is complete."""
        if self._group_handle is not None:
            self._group_handle.refuse_if_given_up("a batch")
        if self._is_asked_to_leave:
            raise PeerLostError(
                "this rank left the group between two batches",
                where=f"rank {self.rank}",
                cause="another worker is about to join, or the call was interrupted",
            )

    def undo(self, call: LoopRun) -> Undone:
        """Undo what `call` has not committed."""
        if call.request.purpose == "validation":
            call.rewind()
            return Undone.CALL
        self.forget_unscaled()
        has_copies = self.memory is not None
        if not has_copies and self.before_call is None and self.rollback.is_complete:
            self.rollback.restore_layers()
            call.finish_step()
            return Undone.NOTHING_AS_STEP_COUNTS
        self.operator._lockstep.forget_step()
        if self.before_call is not None:
            # A `train_epoch` of the user's own: only it knows its state between two batches.
            self.rollback.put_call_start_buffers()
            self.load_state(self.before_call)
            return Undone.CALL if self.rollback.restore_call_start() else Undone.IMPOSSIBLE
        if self.memory is not None and self.has_own_epoch:
            self.memory.rewind_call(call.first_epoch, call.first_step)
            return Undone.CALL
        is_undone = self.rollback.undo(call.cursor, call.committed)
        return Undone.STEP if is_undone or has_copies else Undone.IMPOSSIBLE

    def attach_audit(self, step: int) -> None:
        """Start the audit of this generation, from `step` of the run on."""
        self._audit.attach(self.rank, self.spec.num_workers, step)

    def take_rank(self, rank: int, size: int, local_rank: int) -> None:
        """Become rank `rank` of `size`. The worker's device stays."""
        self.rank, self.local_rank = rank, local_rank
        self.spec = replace(self.spec, num_workers=size)
        self._num_copies = 0
        self._is_asked_to_leave = False

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._group

    # --------------------------------------------------------------------- copies beside it

    def make_copy(self, spec: WorkerSpec, *, alone: bool) -> Worker:
        """Make a second worker in this process, with a group of its own and without an operator.

        Args:
            spec: the spec of the second worker.
            alone: the second worker has no peers, even if this worker has.

        Collective:
            Unless `alone`, every rank: forms the group.
        """
        copy = Worker(spec, 0 if alone else self.rank, self.local_rank)
        if self._rendezvous is not None:
            self._num_copies += not alone
            name = f"copy-{self._num_copies}"
            with self._sockets.record_new_sockets():
                copy._group = form_second_group(
                    self._rendezvous, name, self.rank, self.spec.num_workers, alone=alone
                )
        copy._group_handle = Group(copy._group)
        if self._rendezvous is not None and not alone:
            self._sockets.find_peer_sockets(copy._group_handle)
            copy._rendezvous = self._rendezvous
        return copy

    def build_as_trial(self, device: torch.device) -> OptimizerStepHooks:
        """Run `setup` again, for an operator that is dropped after a few steps."""
        return self._build_operator(device, is_trial=True)

    def as_default_group(self) -> AbstractContextManager[None]:
        """Inside, torch's default group is this worker's group, for the user's code."""
        return use_as_default_group(self)

    # ------------------------------------------------------------------- training, validation

    @remote_method(Communication.UNKNOWN, OnFailure.RAISE)
    def feed(self, streams: Sequence[Any] | None, batches: RayBatches | None) -> None:
        """Train on this rank's stream of `streams`; if None, on the operator's own loader."""
        if streams is None or batches is None:
            self._dataset_switch.end(self.operator, self.cursors)
        else:
            self._dataset_switch.begin(self.operator, self.cursors, streams[self.rank], batches)

    @remote_method(Communication.RUN_GROUP, OnFailure.RESUME, is_timed=True)
    def train(self, request: LoopRequest) -> Report:
        """Train; after an interruption the call goes on with the step that was not committed."""
        if self.run.attached:
            self.run.refuse_added_parameters()
        with self._audit.during_training(self.run), self.snapshots.part.during_training():
            report = self._run(request)
        return replace(report, audit_ledger=self._audit.seen())

    @remote_method(Communication.RUN_GROUP, OnFailure.RESUME, is_timed=True)
    def validate(self, request: LoopRequest) -> Report:
        """Validate; after an interruption again from the beginning, so that all samples count."""
        self.return_before_validation()
        return self._run(request)

    def _run(self, request: LoopRequest) -> Report:
        interrupted = request.interrupted_at
        if interrupted is None or self.loop_run is None:
            self.loop_run = self._begin(request)
        elif interrupted.is_over or self.loop_run.committed.steps < interrupted.steps:
            self.loop_run.catch_up(interrupted)
        self.survivor = None  # the run has come as far again
        report = self.loop_run.run()
        self.is_warm = self.is_warm or self.loop_run.own_steps > 0
        self.before_call = None
        if request.purpose == "train":
            if self._rollback is not None:
                self._rollback.end_call()
            is_saved = self.snapshots.after_call(self.loop_run.committed)
            if self.memory is not None:
                self.memory.after_call(is_saved=is_saved)
        return report

    def _begin(self, request: LoopRequest) -> LoopRun:
        training = request.purpose == "train"
        self.loop_run = None  # the memory of its copies is free for the next ones
        if training and self.memory is not None:
            if request.interrupted_at is None:
                self.memory.begin_call(request)
        elif training and self.has_own_epoch:
            self.before_call = self.copy_state()
        if self._rollback is not None and training:
            self._rollback.begin_call(self.cursors["train"])
        call = LoopRun(
            self.operator,
            self.cursors[request.purpose],
            request,
            arithmetic=self.arithmetic,
            on_commit=self.on_commit,
            rollback=self._rollback if training else None,
            num_batches_to_recompute=self.num_batches_to_recompute if training else 0,
        )
        if training:
            self.num_batches_to_recompute = 0
            self.snapshots.begin()
            state = self.operator._lockstep
            if state.step_log is not None:
                state.step_log.begin_call(state.committed, request.rows_known)
        else:
            call.keep_start(copies_run=self._rollback is not None and self.memory is None)
        if training or self._rollback is not None:
            call.committed.before_batch = self._before_batch
        return call

    def arithmetic(self) -> AbstractContextManager[None]:
        return (
            deterministic_mode(self.spec.threads)
            if self.spec.options.reproducible
            else nullcontext()
        )

    @remote_method(Communication.UNKNOWN, OnFailure.RAISE)
    def update_scheduler(self, metric: float) -> None:
        """Step every scheduler, with `metric` where one takes it."""
        self.return_to_window()
        update_schedulers(self.run.schedulers, metric)

    # ------------------------------------------------------------------------ users' functions

    @remote_method(Communication.UNKNOWN, OnFailure.RAISE)
    def call(self, function: Callable[[], Any]) -> Any:
        """Call `function` in this process."""
        return function()

    @remote_method(Communication.UNKNOWN, OnFailure.RAISE)
    def call_with_operator(self, function: Callable[[TrainingOperator], Any]) -> Any:
        """Call `function` with this worker's operator: what it changes stays."""
        self.return_to_window()
        return function(self.operator)
