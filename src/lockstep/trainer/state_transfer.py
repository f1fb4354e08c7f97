# SPDX-License-Identifier: Apache-2.0
"""`StateTransfer`: takes the run's state from the workers, loads it, and saves it to files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep import checkpoint
from lockstep.checkpoint import StoredTensor
from lockstep.errors import (
    CheckpointError,
    CheckpointWriteError,
    ConfigurationError,
    NotAvailableError,
    TrainerClosedError,
    WorkerDiedError,
)
from lockstep.host_memory import available_memory
from lockstep.operator import TrainingOperator
from lockstep.tensor_tree import leaves_of
from lockstep.trainer.checkpoint_directory import refuse_another_run
from lockstep.worker import (
    Snapshot,
    Worker,
    add_every_rank,
    begin_load,
    hold_part,
    load_parts,
    receive_state,
    run_counts,
)

if TYPE_CHECKING:
    from torch import nn

    from lockstep.trainer.checkpoint_directory import CheckpointDirectory
    from lockstep.trainer.ray_dataset_feed import RayDatasetFeed
    from lockstep.trainer.step_metrics import StepMetrics
    from lockstep.trainer.worker_calls import WorkerCalls
    from lockstep.worker import RemoteCall


class StateTransfer:
    """Takes the state of the run from the workers, and loads a state into them.

    Args:
        workers: the workers.
        explicit: the user's `num_shards` and `seed`; None if not given.
        dataset: the dataset that the workers train on.
        steps: the metrics of single steps, which restart at the state's step.
        disk: the checkpoints of the run, which goes on from each state that is loaded.
    """

    def __init__(
        self,
        workers: WorkerCalls,
        explicit: Mapping[str, Any],
        dataset: RayDatasetFeed,
        steps: StepMetrics,
        disk: CheckpointDirectory,
    ) -> None:
        self._workers = workers
        self._explicit = explicit
        self._dataset = dataset
        self._steps = steps
        self._disk = disk
        operator_cls = workers.spec.operator_cls
        given = operator_cls._lockstep_given
        if given is not None and not operator_cls._lockstep_trains_copies:
            given.note_copies()

    def take(self) -> dict[str, Any]:
        """See `TorchTrainer.state_dict`."""
        return self._take(Worker.state_dict.with_args())

    def _take(self, call: RemoteCall[Worker, dict[str, Any]]) -> dict[str, Any]:
        state, spec = self._state_of_rank_0(call), self._workers.spec
        has_own = spec.operator_cls._lockstep_overrides(TrainingOperator.state_dict)
        if spec.num_workers > 1 and (has_own or "local" in state):
            everyone = self._workers.call(Worker.per_rank_state.with_args())
            state = add_every_rank(state, everyone)
        return state

    def _state_of_rank_0(self, call: RemoteCall[Worker, dict[str, Any]]) -> dict[str, Any]:
        spec = self._workers.spec
        if not spec.saves_parts:
            return self._workers.call_rank_0(call)
        state = self._workers.call(Worker.gathered_state_dict.with_args())[0]
        assert state is not None, "rank 0 answers"
        return state

    def models(self) -> nn.Module | list[nn.Module]:
        """See `TorchTrainer.get_model`."""
        spec = self._workers.spec
        if not spec.saves_parts:
            return self._workers.call_rank_0(Worker.models.with_args())
        needed, available = self._workers.call_rank_0(Worker.room_for_models.with_args())
        _refuse_large(needed, available)
        models = self._workers.call(Worker.gathered_models.with_args())[0]
        assert models is not None, "rank 0 answers"
        return models

    def load(self, state: Mapping[str, Any]) -> None:
        """See `TorchTrainer.load_state_dict`."""
        self._workers.open_engine()
        if not isinstance(state, Mapping):
            raise CheckpointError(
                "this is not the state of a trainer",
                expected="what trainer.state_dict() returned",
                got=f"{type(state).__name__}: {state!r:.60}",
            )
        refuse_another_run(state, self._explicit)
        # Not by the workers: after a loss there are fewer, which replacements will join again.
        self._workers.spec.with_shards_of(state)
        self._begin(state)
        self._workers.call(Worker.check_state.with_args(state))
        self._dataset.set_dataset(None, self._workers)
        is_applied = False
        try:
            self._workers.call(Worker.hold_state.with_args())
            is_applied = True
            self._workers.call(Worker.apply_state.with_args(state))
        except BaseException:
            self._settle_refused(is_applied)
            raise
        self._workers.call(Worker.settle_state.with_args(keep=True))
        self._workers.note_loaded(state)
        step = int(state.get("global_step", 0))
        self._steps.restart_at(step)
        self._disk.go_on_from(step)
        self.update_users_objects()

    def _settle_refused(self, is_applied: bool) -> None:
        """Let the workers go back to the state from before if another one `is_applied` to some."""
        if self._workers.has_ended:
            return
        try:
            self._workers.call(Worker.settle_state.with_args(keep=not is_applied))
        except TrainerClosedError as error:
            self._workers.end(error)
            raise

    def resume(self) -> None:
        """Load the state that the run resumes from, if there is one."""
        if self._disk.resume_state is not None:
            self.load(self._disk.resume_state)
            self._disk.finish_resume()
            self._workers.may_have_changed = False  # it is that of the checkpoint

    def renew_checkpoint(self) -> None:
        """Write the newest checkpoint again, if a call has changed the very state that it holds.

        Training leads from a checkpoint to later states, and what other calls change it does not.
        """
        if self._workers.may_have_changed and self._disk.keeps_checkpoints:
            step = self._workers.call_rank_0(run_counts.with_args()).steps
            self._disk.renew(step, self.snapshot)
        self._workers.may_have_changed = False

    def _begin(self, state: Mapping[str, Any]) -> None:
        """Send its part of `state` to each worker whose host does not see the directory.

        Where a worker has died meanwhile, other ranks have other parts: it begins anew.
        """
        stored = next((leaf for leaf in leaves_of(state) if isinstance(leaf, StoredTensor)), None)
        while not self._send_parts(state, stored):
            pass

    def _send_parts(self, state: Mapping[str, Any], stored: StoredTensor | None) -> bool:
        """Returns whether the group is still the one for whose ranks the parts were."""
        places = self._workers.call(begin_load.with_args(stored))
        engine = self._workers.open_engine()
        generation = engine.status().generation
        try:
            for rank, place in enumerate(places):
                if place is not None:
                    part = checkpoint.read_own_tensors(state, *place)
                    self._workers.call_rank(rank, receive_state.with_args(part))
        except WorkerDiedError:
            if engine.ended_by is not None or engine.status().generation == generation:
                raise
        return engine.status().generation == generation

    def snapshot(self) -> Snapshot:
        """The state of the run between two calls, or its step, of which each rank holds its part.

        A worker in this process does not copy its state, which has to be written before training
        goes on.
        """
        if self._workers.spec.saves_parts:
            return Snapshot(self._workers.call(hold_part.with_args())[0], None)
        # An actor's state arrives as a copy in any case.
        is_here = self._workers.local_operator() is not None
        state = self._take(Worker.state_to_write.with_args()) if is_here else self.take()
        return Snapshot(state["global_step"], state)

    def save(self, path: str | os.PathLike[str]) -> str:
        """See `TorchTrainer.save`."""
        try:
            return self._save(os.fspath(path))
        except CheckpointWriteError:
            if not self._workers.spec.saves_parts:
                raise
            # A worker may have died while it wrote: the next call goes on without it.
            return self._save(os.fspath(path))

    def _save(self, path: str) -> str:
        snapshot, engine = self.snapshot(), self._workers.open_engine()
        return self._disk.write_to(snapshot, engine.write_parts, path)

    def read(self, path: str | os.PathLike[str]) -> None:
        """See `TorchTrainer.load`."""
        self._workers.open_engine()
        self.load(self._disk.read(os.fspath(path)))

    def update_users_objects(self) -> None:
        """Load the trained state into the objects that the user gave to `from_model`."""
        given = self._workers.spec.operator_cls._lockstep_given
        if given is not None and self._copies_are_trained():
            state = self._state_of_rank_0(Worker.state_dict.with_args())
            state.pop("local", None)  # rank 0's local tensors are in its models already
            load_parts(given.run, state)
            given.note_settings()

    def refuse_lost_settings(self) -> None:
        """Refuse settings that the user's own optimizer has, and the workers' copies have not.

        Raises:
            ConfigurationError: the optimizer given to `from_model` was changed in this process.
        """
        given = self._workers.spec.operator_cls._lockstep_given
        if given is None or not self._copies_are_trained() or not (changes := given.changes()):
            return
        # The user may have made the same change in the workers.
        state = self._state_of_rank_0(Worker.state_dict.with_args())
        if given.differs_from(state["optimizers"][0].get("param_groups", ())):
            raise ConfigurationError(
                "the optimizer that from_model was given was changed, and the workers train copies",
                got=", ".join(changes),
                cause="a scheduler around it, or the program, changes the object in this process"
                " alone; with one worker that is the one that trains",
                fix="a TrainingOperator that registers the scheduler in setup, and"
                " scheduler_step_freq='epoch'; or make the same change with"
                " trainer.apply_all_operators(lambda operator: ... operator.optimizer ...)",
            )

    def _copies_are_trained(self) -> bool:
        """Whether the workers train copies of what this process has given to `from_model`."""
        on_copies = self._workers.spec.operator_cls._lockstep_trains_copies
        return not on_copies and self._workers.local_operator() is None


def _refuse_large(needed: int, available: float) -> None:
    """Refuse a whole model for which this host, or rank 0's, has no room.

    Args:
        needed: bytes of the model.
        available: bytes that rank 0's host has left.

    Raises:
        NotAvailableError: it would not fit.
    """
    # Here the model arrives, and then it is unpacked.
    room = min(available, available_memory() / 2)
    if needed > room:
        raise NotAvailableError(
            "the whole model does not fit into the memory of a host",
            expected=f"{needed / 2**20:,.0f} MiB for one copy",
            got=f"{max(room, 0.0) / 2**20:,.0f} MiB",
            fix="trainer.save(path) writes it in parts, and lockstep.checkpoint.convert(path, file)"
            " makes one file of them, which needs no memory for it",
        )
