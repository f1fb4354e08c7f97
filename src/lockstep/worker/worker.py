# SPDX-License-Identifier: Apache-2.0
"""One worker's life: its place in the group, its operator, its position in the data."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep.data import Placement, shards_of
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.group import Group
from lockstep.keys import NUM_STEPS, SCHEDULER_STEP, SCHEDULER_STEP_EPOCH, USE_FP16
from lockstep.metrics.numeric import as_number
from lockstep.operator.joint import reduction_of
from lockstep.operator.loops import checked_metrics, registered
from lockstep.operator.registration import step_schedulers, update_schedulers
from lockstep.operator.setting import Setting
from lockstep.randomness import derive_seed, preserved
from lockstep.reduction import activate
from lockstep.worker import prediction, trial
from lockstep.worker import state as states
from lockstep.worker.deliveries import Cursor, Deliveries, Tally
from lockstep.worker.determinism import deterministic
from lockstep.worker.process_group import (
    Rendezvous,
    form_group,
    form_second_group,
    leave_group,
    taken_for_world,
)
from lockstep.worker.sources import open_source
from lockstep.worker.spec import config_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist
    from torch import nn

    from lockstep.operator import TrainingOperator
    from lockstep.operator.registration import Registered
    from lockstep.worker.spec import WorkerSpec


@dataclass(frozen=True)
class Report:
    """What one worker brings back from `train` or `validate`.

    Attributes:
        metrics: what the operator's loop returned, one entry a pass over (part of) an epoch.
        summaries: what lockstep's own loop had returned inside it; None where it did not run.
        sums: the sums behind the summaries, over the whole call (see `lockstep.metrics.merge`).
        samples_by_pass: this worker's samples in each pass.
        samples: samples of this worker, each counted once.
        steps: global batches.
        epoch: passes over the training data begun, this call's included; None for `validate`.
        timers: seconds by phase; None unless asked for (`profile`).
        weighed_by: what the losses of lockstep's own loops counted for; None if there were none.
        measured: the registered torchmetrics objects, by the key of their result.
    """

    metrics: list[dict[str, Any]]
    summaries: list[dict[str, Any] | None]
    sums: dict[str, Any]
    samples_by_pass: list[int]
    samples: int
    steps: int
    epoch: int | None
    timers: dict[str, float] | None
    weighed_by: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)


class Worker:
    """Rank `rank` of a run. Its methods are called by an engine, one at a time.

    `progress` alone may be called from another thread meanwhile.
    """

    def __init__(self, spec: WorkerSpec, rank: int, local_rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.local_rank = local_rank
        self._group: dist.ProcessGroup | None = None
        self._rendezvous: Rendezvous | None = None
        self._num_copies = 0
        self._operator: TrainingOperator | None = None
        self._cursors: dict[str, Cursor] = {}
        self._before_load: dict[str, Any] | None = None
        self._tally = Tally()
        self._threads_before: int | None = None
        self.on_commit: Callable[[], None] | None = None
        self.before_meeting: Callable[[], None] | None = None

    # ------------------------------------------------------------------------- life and death

    def start(self, rendezvous: Rendezvous | None) -> dict[str, Any]:
        """Meet the peers, build the operator, run its `setup`.

        Returns:
            ``pid``, ``device``, and ``loaders``: steps in an epoch by purpose, None if unknown.
        """
        spec = self.spec
        if spec.threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(spec.threads)
        device = _pick_device(spec.use_gpu, self.local_rank)
        if spec.initialization_hook is not None:
            spec.initialization_hook()
        if rendezvous is not None:
            if self.before_meeting is not None:
                self.before_meeting()
            self._rendezvous = rendezvous
            self._group = form_group(rendezvous, self.rank, spec.num_workers, device)
        self._build_operator(device)
        loaders = {name: cursor.source.steps_per_epoch for name, cursor in self._cursors.items()}
        return {"pid": os.getpid(), "device": str(device), "loaders": loaders}

    def _build_operator(self, device: torch.device, *, is_trial: bool = False) -> None:
        spec = self.spec
        setting = Setting(
            world_rank=self.rank,
            world_size=spec.num_workers,
            local_rank=self.local_rank,
            device=device,
            group=Group(self._group, device),
            placement=self._placement(spec.num_shards, spec.seed),
            options=spec.options,
            is_trial=is_trial,
            owner=self._rendezvous.owner if self._rendezvous is not None else None,
        )
        config = config_for(spec.config, spec.num_shards, setting.placement.shards[0])
        operator = spec.operator_cls(config, setting)
        # Known before `setup` may fail, so that what it registered is let go of.
        self._operator = operator
        with preserved(derive_seed(spec.seed, "setup")):
            operator.setup(operator.config)
        sync = registered(operator).sync
        if sync is not None and spec.num_workers > 1:
            # What `setup` did to the weights after `register` it may have done on some ranks only.
            sync.agree_on_values()
        self._open_loaders(operator)

    def _placement(self, num_shards: int, seed: int) -> Placement:
        return Placement(num_shards, shards_of(self.rank, self.spec.num_workers, num_shards), seed)

    def _open_loaders(self, operator: TrainingOperator) -> None:
        self._close_loaders()
        for purpose, loader in operator._lockstep.loaders.items():
            if loader is not None:
                source = open_source(operator, loader, purpose)
                self._cursors[purpose] = Cursor(source)
        if operator._lockstep.sync is not None and "train" in self._cursors:
            usual = self._cursors["train"].source.global_batch_size
            operator._lockstep.sync.expect_weight(usual)

    def _close_loaders(self) -> None:
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()

    def leave(self) -> None:
        """Detach from the group and close it: ranks that wait for this one get an error."""
        if self._operator is not None and self._operator._lockstep.sync is not None:
            self._operator._lockstep.sync.detach()
        if self._operator is not None:
            self._operator._lockstep.setting.group.close()
        group, self._group = self._group, None
        if group is not None:
            leave_group(group)

    def stop(self) -> None:
        """End: also the loaders' worker processes and iterators."""
        self._close_loaders()
        self.leave()
        self._operator = None
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    # --------------------------------------------------------------------- copies beside it

    def verify(self, num_steps: int) -> trial.Trial:
        """`num_steps` steps on copies; this worker stays as it is."""
        return trial.run(self, num_steps)

    def predict(self, loader: Any) -> list[prediction.Predicted]:
        """This worker's share of `loader`; the run stays as it is."""
        return prediction.predict(self, loader)

    def copied(self, spec: WorkerSpec, *, alone: bool) -> Worker:
        """A second worker in this process, with a group of its own and no operator yet.

        Args:
            spec: what it is a worker of.
            alone: it has no peers, whatever this worker has.

        Collective:
            Unless `alone`, every rank: forms the group.
        """
        copy = Worker(spec, 0 if alone else self.rank, self.local_rank)
        if self._rendezvous is not None:
            self._num_copies += not alone
            name = f"copy-{self._num_copies}"
            copy._group = form_second_group(
                self._rendezvous, name, self.rank, self.spec.num_workers, alone=alone
            )
            copy._rendezvous = None if alone else self._rendezvous
        return copy

    def build_as_trial(self) -> None:
        """Run `setup` again, for an operator that is thrown away after a few steps."""
        self._build_operator(_pick_device(self.spec.use_gpu, self.local_rank), is_trial=True)

    def in_its_world(self) -> AbstractContextManager[None]:
        """Inside, torch's default group is this worker's, for what the user's code asks of it."""
        return taken_for_world(self)

    # ------------------------------------------------------------------- training, validation

    def train(self, num_steps: int | None, profile: bool, info: Mapping[str, Any]) -> Report:
        operator, cursor = self.operator, self._cursors["train"]
        if self.run.attached:
            self.run.refuse_replaced()
        full_info = self._info(info, num_steps, cursor)

        def one_pass(deliveries: Deliveries) -> dict[str, Any]:
            full_info["epoch_idx"] = cursor.epoch
            return operator.train_epoch(deliveries, full_info)

        return self._passes("train", cursor, num_steps, profile, one_pass)

    def validate(self, num_steps: int | None, profile: bool, info: Mapping[str, Any]) -> Report:
        operator, cursor = self.operator, self._cursors["validation"]

        def one_pass(deliveries: Deliveries) -> dict[str, Any]:
            return operator.validate(deliveries, dict(info))

        return self._passes("validation", cursor, num_steps, profile, one_pass)

    def _passes(
        self,
        purpose: str,
        cursor: Cursor,
        num_steps: int | None,
        profile: bool,
        one_pass: Callable[[Deliveries], dict[str, Any]],
    ) -> Report:
        """Call `one_pass` once per epoch touched, until `num_steps` or the epoch's end."""
        operator = self.operator
        operator.timers.reset()
        operator.timers.enable() if profile else operator.timers.disable()
        self._tally = tally = Tally(on_commit=self.on_commit)
        operator._lockstep.begin_call(purpose)
        if operator._lockstep.sync is not None:
            # Also for validation: weights that are in shards are gathered by all ranks at once.
            operator._lockstep.sync.begin_step(operator._lockstep.committed)
        metrics: list[dict[str, Any]] = []
        summaries: list[dict[str, Any] | None] = []
        samples_by_pass: list[int] = []
        epoch = cursor.epochs_entered
        with preserved(), self.arithmetic(), activate(reduction_of(operator, None)):
            while True:
                if not cursor.at_epoch_start and cursor.is_exhausted():
                    self._end_epoch(cursor, purpose)
                if cursor.at_epoch_start:
                    cursor.source.agree(operator._lockstep.setting.group, cursor.epoch)
                operator._lockstep.summary = None
                left = None if num_steps is None else num_steps - tally.steps
                deliveries = Deliveries(operator, cursor, tally, limit=left, purpose=purpose)
                method = "train_epoch" if purpose == "train" else "validate"
                metrics.append(checked_metrics(operator, method, one_pass(deliveries)))
                deliveries.commit()
                summaries.append(operator._lockstep.summary)
                samples_by_pass.append(tally.samples - sum(samples_by_pass))
                epoch = max(epoch, cursor.epochs_entered)
                if deliveries.epoch_over:
                    self._end_epoch(cursor, purpose)
                finished = num_steps is None or tally.steps >= num_steps
                if finished or not deliveries.epoch_over or deliveries.delivered == 0:
                    break
        self.run.seal()
        return Report(
            metrics=metrics,
            summaries=summaries,
            sums=operator._lockstep.meters.state(),
            samples_by_pass=samples_by_pass,
            samples=tally.samples,
            steps=tally.steps,
            epoch=epoch if purpose == "train" else None,
            timers=operator.timers.stats() if profile else None,
            weighed_by=operator._lockstep.weighed_by.get(purpose),
            measured=operator._lockstep.measures.collected(purpose),
        )

    def arithmetic(self) -> AbstractContextManager[None]:
        return deterministic(self.spec.threads) if self.spec.options.reproducible else nullcontext()

    def _end_epoch(self, cursor: Cursor, purpose: str) -> None:
        """Also where an epoch of unknown length turns out to have ended with the last call."""
        operator = self.operator
        wanted = purpose == "train" and operator.scheduler_step_freq == SCHEDULER_STEP_EPOCH
        # A loop of the user's own steps them itself, unless it ran ours.
        if wanted and (operator._lockstep.ran_our_epoch or not operator._brings("train_epoch")):
            step_schedulers(self.run.schedulers)
        operator._lockstep.ran_our_epoch = False
        cursor.finish_epoch()

    def _info(
        self, info: Mapping[str, Any], num_steps: int | None, cursor: Cursor
    ) -> dict[str, Any]:
        operator = self.operator
        return {
            **info,
            NUM_STEPS: num_steps,
            USE_FP16: operator.use_fp16,
            SCHEDULER_STEP: operator.scheduler_step_freq,
            "epoch_idx": cursor.epoch,
        }

    def progress(self) -> dict[str, Any]:
        """Steps and samples so far, over all workers, in the call that runs; its latest loss."""
        tally, operator = self._tally, self._operator
        if operator is None:
            return {}
        placement = operator._lockstep.setting.placement
        samples = tally.samples * placement.num_shards / len(placement.shards)
        latest = operator._lockstep.latest
        loss = as_number(latest.get("train_loss", latest.get("val_loss")))
        # A number: a driver without CUDA could not even receive a tensor that lives there.
        loss = None if loss is None else float(loss)
        return {"steps": tally.steps, "samples": samples, "loss": loss}

    def steps_ahead(self, purpose: str, num_steps: int | None) -> int | None:
        """Global batches that the next call will make; None if the data has no length."""
        if num_steps is not None:
            return num_steps
        cursor = self._cursors[purpose]
        total = cursor.source.steps_per_epoch
        return None if total is None else total - cursor.step

    def update_scheduler(self, metric: float) -> None:
        if not self.run.schedulers:
            raise ConfigurationError(
                "update_scheduler was called, but the operator registered no scheduler",
                fix="self.register(..., schedulers=...) in setup",
            )
        update_schedulers(self.run.schedulers, metric)

    # ------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything that this rank knows of the run; the same on every rank but "operator"."""
        self.run.seal()
        state = states.collect(self.operator, self.run)
        state["epoch"] = self._cursors["train"].epochs_entered if "train" in self._cursors else 0
        state["position"] = {
            purpose: {"epoch": cursor.epoch, "step": cursor.step}
            for purpose, cursor in self._cursors.items()
        }
        self._rewind_to_window(state)
        placement = self.operator._lockstep.setting.placement
        state["seed"], state["num_shards"] = placement.seed, placement.num_shards
        return state

    def _rewind_to_window(self, state: dict[str, Any]) -> None:
        """Gradients are not saved: a window that is open is computed again from its start."""
        if "train" in self._cursors:
            cursor = self._cursors["train"]
            state["position"]["train"]["step"] = cursor.window_start
            state["global_step"] -= cursor.step - cursor.window_start

    def operator_state(self) -> Any:
        return states.copied(self.operator.state_dict())

    def check_state(self, state: Mapping[str, Any]) -> None:
        self.run.seal()
        states.check(self.run, state)
        shards = state.get("num_shards", self.spec.num_shards)
        if shards < self.spec.num_workers:
            raise CheckpointError(
                "the state cuts every global batch into fewer shards than there are workers",
                expected=f"at most {shards} workers",
                got=f"num_workers={self.spec.num_workers}",
                fix=f"TorchTrainer(..., num_workers={shards})",
            )

    def apply_state(self, state: Mapping[str, Any]) -> None:
        """Take the state over; on an error, and until `settle_state`, it can be taken back."""
        self._before_load = self.state_dict()
        self.go_to(state)

    def settle_state(self, keep: bool) -> None:
        before, self._before_load = self._before_load, None
        if not keep and before is not None:
            self.go_to(before)

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Take over, for good, what a worker of the same run returned from `state_dict`."""
        operator = self.operator
        states.apply(operator, self.run, self._own_part(state))
        before = operator._lockstep.setting.placement
        placement = self._placement(
            state.get("num_shards", before.num_shards), state.get("seed", before.seed)
        )
        if placement != before:
            operator._lockstep.setting = replace(operator._lockstep.setting, placement=placement)
            self._open_loaders(operator)
        for purpose, place in state.get("position", {}).items():
            if purpose in self._cursors:
                self._cursors[purpose].move_to(place["epoch"], place["step"])

    def _own_part(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        by_rank = state.get("operator_by_rank")
        if by_rank is None or len(by_rank) != self.spec.num_workers:
            return state
        return {**state, "operator": by_rank[self.rank]}

    def whole(self, method: str) -> Any:
        """What rank 0's `method` gives, where all ranks have to take part in it."""
        answer = getattr(self, method)()
        return answer if self.rank == 0 else None

    def models(self) -> nn.Module | list[nn.Module]:
        self.run.seal()
        return states.model_copies(self.run)

    # ------------------------------------------------------------------------ users' functions

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def call_with_operator(self, function: Callable[[TrainingOperator], Any]) -> Any:
        return function(self.operator)

    @property
    def operator(self) -> TrainingOperator:
        assert self._operator is not None, "start() comes first"
        return self._operator

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self._group

    @property
    def run(self) -> Registered:
        return registered(self.operator)


def _pick_device(use_gpu: bool, local_rank: int) -> torch.device:
    if not use_gpu:
        return torch.device("cpu")
    # Ray shows a worker only its own GPUs; without that, ranks of one node share the list.
    count = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device
