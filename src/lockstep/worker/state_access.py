# SPDX-License-Identifier: Apache-2.0
"""`StateAccess`: collects and loads a worker's state, with the position in the data."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint import read_own_tensors
from lockstep.data import ShardAssignment, shards_of
from lockstep.data_parallel_mesh import DataParallelMesh
from lockstep.host_memory import available_memory
from lockstep.local_rows import LocalRows
from lockstep.operator import TrainingOperator
from lockstep.operator.buffer_values import buffer_values, put_buffer_values
from lockstep.operator.rank_context import shard_order
from lockstep.operator.registration import registered_parts
from lockstep.tensor_tree import leaves_of
from lockstep.worker import state_dict as state_dicts
from lockstep.worker.committed_counts import CommittedCounts
from lockstep.worker.data_cursor import Cursor
from lockstep.worker.dataset_switch import DATASET, DatasetSwitch
from lockstep.worker.loader_sharding import make_sharded_loader
from lockstep.worker.local_state import local_state
from lockstep.worker.per_rank_state import PER_RANK, part_of_rank
from lockstep.worker.remote_method import Communication, OnFailure, remote_method
from lockstep.worker.saved_gradients import GRADIENTS, SavedGradients
from lockstep.worker.state_refusals import no_state_held_error, refuse_unfit_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from lockstep.operator.buffer_values import BufferValues
    from lockstep.operator.training_parts import TrainingParts
    from lockstep.worker.rollback import Rollback
    from lockstep.worker.spec import WorkerSpec
    from lockstep.worker.user_state_copy import UserStateCopy

_log = logging.getLogger("lockstep")


class StateAccess:
    """The part of `Worker` that collects its state of the run, and loads another state."""

    cursors: dict[str, Cursor]
    spec: WorkerSpec
    rank: int
    num_batches_to_recompute: int
    before_call: dict[str, Any] | None
    call_number: int
    incoming: Mapping[str, Any] | None
    memory: object  # None where every rank has the whole state
    _before_load: tuple[dict[str, Any], BufferValues, int] | None
    _dataset_switch: DatasetSwitch
    _operator: TrainingOperator | None
    _rollback: Rollback | None

    @property
    def operator(self) -> TrainingOperator:
        assert self._operator is not None, "start() comes first"
        return self._operator

    @property
    def run(self) -> TrainingParts:
        return registered_parts(self.operator)

    @property
    def rollback(self) -> Rollback:
        """The undo of the open step, of a worker that can go back (`WorkerSpec.can_go_back`)."""
        assert self._rollback is not None, "this worker cannot go back"
        return self._rollback

    @property
    def has_own_epoch(self) -> bool:
        """Whether a user's `train_epoch` runs: it alone knows its state between batches."""
        return self.operator._lockstep_overrides(TrainingOperator.train_epoch)

    @property
    def epochs_entered(self) -> int:
        """Passes over the training data that were begun."""
        cursor = self.cursors.get("train")
        return self._dataset_switch.epochs_finished if cursor is None else cursor.epochs_entered

    @property
    def epochs_finished(self) -> int:
        """Passes over the training data that were completed."""
        cursor = self.cursors.get("train")
        return self._dataset_switch.epochs_finished if cursor is None else cursor.epochs_finished

    @property
    def reads_dataset(self) -> bool:
        """Whether training reads a Ray dataset in the place of the operator's loader."""
        return self._dataset_switch.is_open

    def make_shard_assignment(self, num_shards: int, seed: int, rank: int) -> ShardAssignment:
        """The shards of `rank` in the worker's group."""
        return ShardAssignment(num_shards, shards_of(rank, self.spec.num_workers, num_shards), seed)

    def _open_loaders(self, operator: TrainingOperator) -> None:
        self._close_loaders()
        for purpose, loader in operator._lockstep.loaders.items():
            if loader is not None:
                source = make_sharded_loader(operator, loader, purpose)
                self.cursors[purpose] = Cursor(source)
        operator._lockstep.epochs_finished = lambda: self.epochs_finished
        self.expect_usual_weight()

    def expect_usual_weight(self) -> None:
        """Tell the gradient sync the weight of a usual step: the global batch size."""
        sync = self.operator._lockstep.sync
        if sync is not None and "train" in self.cursors:
            sync.expect_weight(self.cursors["train"].source.global_batch_size)

    def _close_loaders(self) -> None:
        for cursor in self.cursors.values():
            cursor.close()
        self.cursors.clear()

    @remote_method(Communication.NONE, OnFailure.REPEAT)
    def state_to_write(self) -> dict[str, Any]:
        """`state_dict` without copies of CPU tensors, for a caller that reads it at once."""
        return self.state_dict(state_dicts.move_to_cpu)

    @remote_method(Communication.NONE, OnFailure.REPEAT)
    def state_dict(self, take: Callable[[Any], Any] = state_dicts.copy_to_cpu) -> dict[str, Any]:
        """The state of the run; equal on all ranks except for what `per_rank_state` has.

        Args:
            take: see `lockstep.worker.state_dict.collect`.
        """
        rollback = None if self._is_rewound else self._rollback
        if self.rank == 0 and rollback is not None and rollback.holds_unreduced_window:
            _log.warning(
                "a state was taken while gradients wait under no_sync(), which it does not hold:"
                " what goes on from it lacks them. Close the window before: run its last backward"
                " outside of no_sync(), and step the optimizer"
            )
        return self.copy_state(take)

    def copy_state(self, take: Callable[[Any], Any] = state_dicts.copy_to_cpu) -> dict[str, Any]:
        """As `state_dict`, without the warning of gradients that the state leaves out."""
        state = state_dicts.collect(self.operator, self.run, take)
        state["epoch"] = self.epochs_entered
        state["position"] = self._dataset_switch.positions(self.cursors)
        self._rewind_to_window(state)
        assignment = self.operator._lockstep.context.shard_assignment
        state["seed"], state["num_shards"] = assignment.seed, assignment.num_shards
        if self.run.has_local_tensors:
            state["local"] = take(self.local_state())
        if (waiting := self._waiting_gradients()) is not None:
            state[GRADIENTS] = take(waiting.by_name(self.run, local=False))
        return state

    def own_state_dict(
        self, copy: Callable[[Any], Any] = state_dicts.copy_own_rows
    ) -> dict[str, Any]:
        """A copy of `state_dict` with `LocalRows` in the place of shards.

        Args:
            copy: `copy_own_rows`, or one into memory of its choice.

        Collective:
            None; every rank if a user's `state_dict` returns shards, which are gathered.
        """
        state = self.copy_state(copy)
        if any(isinstance(leaf, LocalRows) for leaf in leaves_of(state["operator"])):
            state["operator"] = state_dicts.copy_to_cpu(self.operator.state_dict())
        return state

    def _waiting_gradients(self) -> SavedGradients | None:
        """The gradients of all ranks that wait in a loop of the user's own for an optimizer."""
        rollback = None if self._is_rewound or self.spec.saves_parts else self._rollback
        if rollback is None or rollback.holds_unreduced_window:
            return None
        return rollback.window_gradients()

    @property
    def _is_rewound(self) -> bool:
        """Whether a state goes back to the start of an open window, and so holds no gradients."""
        cursor = self.cursors.get("train")
        return cursor is not None and cursor.has_open_window

    def _rewind_to_window(self, state: dict[str, Any]) -> None:
        """Set the state back to the start of an open window, whose gradients are not saved."""
        if "train" in self.cursors:
            cursor = self.cursors["train"]
            key = DATASET if self.reads_dataset else "train"
            if cursor.has_open_window:
                state["position"][key] |= {"step": cursor.window_start, "is_over": False}
            state["global_step"] -= cursor.step - cursor.window_start
            self._put_window_start(state)
            if self._is_rewound and self._rollback is not None:
                self._rollback.put_window_settings(state, state_dicts.copy_to_cpu)
            if self._user_state_before is not None:
                state["operator"] = state_dicts.copy_to_cpu(self._operator_state())

    def _put_window_start(self, state: dict[str, Any]) -> None:
        """Give the modules' tensors in `state` the values from before an open window."""
        if not self._is_rewound:
            return
        states = [*state["models"], state["criterion"]]
        before = self.operator._lockstep.window.buffers_before
        if before is not None:
            before.put_into(states)
        if self._rollback is not None:
            self._rollback.put_window_start(states)

    def return_to_window(self) -> bool:
        """Between calls, undo the batches of an open window: the next call computes them again.

        Every state and every undo goes back to the window's beginning.

        Returns:
            False, and nothing has changed, if there is none but a window of a loop's own, or if
            the window cannot be undone.
        """
        rollback = self._rollback
        if not self._is_rewound or rollback is None or rollback.has_missed_write:
            return False
        state = self.operator._lockstep
        before = state.committed
        done = rollback.undo(self.cursors["train"], CommittedCounts())
        self.num_batches_to_recompute += before - state.committed
        return done

    def return_before_validation(self) -> None:
        """Before a validation that may change the user's own state: as `return_to_window`.

        States and undos take that state from the window's start, without what came after it.
        """
        if self._user_state_before is not None:
            self.return_to_window()

    @property
    def _user_state_before(self) -> UserStateCopy | None:
        """The user's own state from the start of an open window; None without either."""
        if self._rollback is None or not self._is_rewound:
            return None
        return self._rollback.user_state_before

    @remote_method(Communication.RUN_GROUP, OnFailure.REPEAT)
    def gathered_state_dict(self) -> dict[str, Any] | None:
        """`state_dict` of what is in shards: all ranks take part, rank 0 answers."""
        if self.rank == 0:
            return self.state_dict()
        self.state_dict(state_dicts.gather_for_others)
        return None

    @property
    def per_rank_keys(self) -> tuple[str, ...]:
        """The keys of a state under which each rank has something else."""
        has = {
            "operator": self.operator._lockstep_overrides(TrainingOperator.state_dict),
            "local": self.run.has_local_tensors,
        }
        return tuple(key for key in PER_RANK if has[key])

    @remote_method(Communication.NONE, OnFailure.REPEAT)
    def per_rank_state(self) -> dict[str, Any]:
        """What `state_dict` has under `per_rank_keys`."""
        taken = {"operator": self._operator_state, "local": self.local_state}
        return {key: state_dicts.copy_to_cpu(taken[key]()) for key in self.per_rank_keys}

    def local_state(self) -> dict[str, Any]:
        """This rank's `lockstep.local` tensors; in an open window those of its start."""
        own = local_state(self.run)
        self._put_window_start(own)
        if (waiting := self._waiting_gradients()) is not None:
            own[GRADIENTS] = waiting.by_name(self.run, local=True)
        return own

    def _operator_state(self) -> Any:
        """The user's own state; in an open window that of its start, as in `state_dict`."""
        before = self._user_state_before
        return self.operator.state_dict() if before is None else before.value()

    @remote_method(Communication.NONE, OnFailure.REPEAT)
    def check_state(self, state: Mapping[str, Any]) -> None:
        refuse_unfit_state(self.run, state)

    @remote_method(Communication.OWN_STATE, OnFailure.REPEAT)
    def hold_state(self) -> None:
        """Hold the present state, to which `settle_state` can go back.

        A call of its own, because here alone ranks may wait for each other: one that refuses
        `apply_state` leaves nobody waiting.
        """
        before = self.own_state_dict()
        # `before` lies at the start of the open window: batches after it are computed again, and
        # must not be counted again.
        num_counted = self.operator._lockstep.committed - before["global_step"]
        buffers = buffer_values(self.run, state_dicts.copy_own_rows)
        self._before_load = before, buffers, self.num_batches_to_recompute + num_counted

    @remote_method(Communication.NONE, OnFailure.REPEAT_WRITE)
    def apply_state(self, state: Mapping[str, Any]) -> None:
        """Load `state`; until `settle_state` the state that is held can be restored.

        Args:
            state: as `state_dict` returns it; or with a `StoredTensor` in the place of tensors, of
                which this rank reads its rows.
        """
        # The group has formed anew since, and all ranks have gone back to the same checkpoint. A
        # replica that has joined since has the state of another one, which may be `state`.
        if self._before_load is None and self.memory is not None:
            self.hold_state()
        incoming, self.incoming = self.incoming, None
        if incoming is None:
            incoming = read_own_tensors(self._own_part(state), *self.place_in_shards)
        if self.operator._lockstep.step_log is not None:
            self.operator._lockstep.step_log.rewind_to(0)
        self.load_state(incoming)

    @remote_method(Communication.NONE, OnFailure.RAISE)
    def settle_state(self, keep: bool) -> None:
        """Forget the state that is held, or go back to it unless `keep`.

        Raises:
            TrainerClosedError: this rank holds none, and has what `apply_state` has left.
        """
        held, self._before_load = self._before_load, None
        if not keep:
            if held is None:
                raise no_state_held_error()
            before, buffers, num_counted = held
            put_buffer_values(self.run, buffers, self.operator.device)
            self.load_state(before)
            self.num_batches_to_recompute = num_counted
        # Where loading has failed early on some ranks, their positions have not moved.
        for cursor in self.cursors.values():
            cursor.forget_agreement()

    def forget_unscaled(self) -> None:
        """Let loss scalers forget the step that was interrupted; see `Precision`."""
        modules = (each for root in self.run.modules() for each in root.modules())
        self.operator._lockstep.precision.forget_unscaled(self.operator, *modules)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the `state_dict` of a worker of the same run, without a way back."""
        operator = self.operator
        self.num_batches_to_recompute = 0
        operator._lockstep.forget_step()
        self.forget_unscaled()
        if self._rollback is not None:
            self._rollback.forget()
        state_dicts.apply(operator, self.run, self._own_part(state))
        if operator._lockstep.step_log is not None:
            operator._lockstep.step_log.rewind_to(operator._lockstep.committed)
        for parameter in self.run.parameters():
            parameter.grad = None  # of another state; a new process has none either
        waiting = SavedGradients.from_state(self.run, self._own_part(state))
        if self._rollback is not None:
            self._rollback.restore_window_gradients(waiting)
        elif waiting is not None:
            waiting.restore(list(self.run.parameters()))
        before = operator._lockstep.context.shard_assignment
        assignment = self.make_shard_assignment(
            state.get("num_shards", before.num_shards), state.get("seed", before.seed), self.rank
        )
        if assignment != before:
            operator._lockstep.context = replace(
                operator._lockstep.context, shard_assignment=assignment
            )
            order, sync = shard_order(operator._lockstep.context), operator._lockstep.sync
            if order is not None and sync is not None:
                sync.set_shard_order(order)
            self._open_loaders(operator)
        places = state.get("position", {})
        if not places and "epoch" in state:
            places = {"train": {"epoch": int(state["epoch"]), "step": 0}}  # a state of RaySGD's
        self._dataset_switch.move_to(places, self.cursors)

    @property
    def mesh(self) -> DataParallelMesh:
        """This rank's place among those over which copies of the models are sharded."""
        size = self.run.sync_options.dp_shard_size
        return DataParallelMesh(self.rank, self.spec.num_workers, size)

    @property
    def place_in_shards(self) -> tuple[int, int]:
        """This rank among those that share a state's tensors out, and their number.

        Where weights are whole on every rank, so is what is loaded: optimizers take their rows.
        """
        return self.place_among(self.rank, self.spec.num_workers)

    def place_among(self, rank: int, size: int) -> tuple[int, int]:
        """`place_in_shards` of this worker as rank `rank` of `size`."""
        sync, dp_shard_size = self.operator._lockstep.sync, self.run.sync_options.dp_shard_size
        mesh = DataParallelMesh(rank, size, dp_shard_size)
        has_units = sync is not None and bool(sync.units)
        return (mesh.shard_rank, mesh.shard_size) if has_units else (0, 1)

    def _own_part(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return part_of_rank(state, self.rank, self.spec.num_workers)

    @remote_method(Communication.NONE, OnFailure.REPEAT)
    def room_for_models(self) -> tuple[int, float]:
        """The bytes of the whole models, and those that this rank's host has left."""
        held = [*self.run.parameters(), *self.run.buffers()]
        needed = sum(tensor.numel() * tensor.element_size() for tensor in held)
        return needed, available_memory()

    @remote_method(Communication.RUN_GROUP, OnFailure.REPEAT)
    def gathered_models(self) -> nn.Module | list[nn.Module] | None:
        """`models` whose weights may be in shards: all ranks take part, rank 0 answers."""
        if self.run.whole_models:
            return state_dicts.gather_models(self.run, keep=self.rank == 0)
        return self.models() if self.rank == 0 else None

    @remote_method(Communication.NONE, OnFailure.REPEAT)
    def models(self) -> nn.Module | list[nn.Module]:
        return state_dicts.model_copies(self.run, self.run.plain_models())

    @remote_method(Communication.NONE, OnFailure.REPEAT)
    def averaged_models(self) -> nn.Module | list[nn.Module]:
        return state_dicts.model_copies(self.run, state_dicts.averaged_models(self.run))
