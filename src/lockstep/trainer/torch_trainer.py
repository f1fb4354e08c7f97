# SPDX-License-Identifier: Apache-2.0
"""`TorchTrainer`: the driver of a run, which starts the workers, calls them and writes files."""

from __future__ import annotations

import inspect
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from lockstep.engine import Resources
from lockstep.operator import Options, TrainingOperator
from lockstep.trainer import argument_checks as checks
from lockstep.trainer import verification
from lockstep.trainer.argument_checks import DEFAULT_SEED
from lockstep.trainer.audit_comparison import AuditComparison
from lockstep.trainer.callback_list import CallbackList
from lockstep.trainer.checkpoint_directory import CheckpointDirectory
from lockstep.trainer.launch import Placement, start_workers
from lockstep.trainer.loader_checks import check_loader
from lockstep.trainer.loop_calls import loop_request, reduce_reports, run_loop
from lockstep.trainer.prediction_order import order_predictions
from lockstep.trainer.ray_dataset_feed import ON_RAY_DATASET, RayDatasetFeed
from lockstep.trainer.state_transfer import StateTransfer
from lockstep.trainer.step_metrics import StepMetrics
from lockstep.trainer.step_replay import replay_run, trainer_maker
from lockstep.trainer.tune_trainable import as_trainable
from lockstep.trainer.worker_calls import WorkerCalls
from lockstep.worker import Worker, WorkerSpec, predict

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from lockstep.parity import ParityReport
    from lockstep.trainer.callbacks import Callback
    from lockstep.trainer.profiler_traces import Profile
    from lockstep.trainer.step_replay import ReplayReport


class TorchTrainer:
    """Trains one model with `num_workers` workers, which live until `shutdown`.

    ::

        trainer = TorchTrainer(training_operator_cls=Digits, num_workers=2, config={"lr": 0.1})
        for _ in range(10):
            print(trainer.train(), trainer.validate())
        model = trainer.get_model()
        trainer.shutdown()

    It is a context manager too. One worker runs in this process; several are Ray actors.

    Args:
        training_operator_cls: a `TrainingOperator` subclass, not an instance.
        initialization_hook: called without arguments in every worker before anything else.
        config: given to `setup`. ``config[BATCH_SIZE]`` is the global batch size.
        num_workers: processes that train. With `num_shards` given it changes the speed alone.
        num_shards: parts that every global batch is cut into; `num_workers` if None. A loader's
            own ``batch_size`` is multiplied by it, ``config[BATCH_SIZE]`` is not.
        num_cpus_per_worker: CPUs, and threads of torch (one at least), for each worker.
        use_gpu: True, False, or "auto": whether CUDA is available here, or other machines of the
            cluster have a GPU for every worker.
        resources_per_worker: further Ray resources for each worker, by name.
        backend: "nccl", "gloo", or "auto": nccl on GPUs.
        sync: how N gradients become one; "replicate" (hooks on the parameters), "ddp", "fsdp",
            "parameter_server" (one server), "data_parallel" (`num_workers` devices, one process).
        wrap_ddp: False leaves gradient synchronisation to a wrapper of your own.
        timeout_s: bound of every collective, in seconds.
        use_fp16: the same as ``precision="fp16"``.
        precision: "fp32", "bf16" or "fp16": what the default loop computes in.
        use_tqdm: a progress bar on the driver, where there is a terminal or a notebook.
        add_dist_sampler: False lets every worker read its own loader as it is.
        scheduler_step_freq: "batch", "epoch" or "manual"; needed with schedulers.
        use_local: rank 0 runs in this process, so that ``breakpoint()`` in it works.
        spare_workers: further workers, ready to take the place of one that dies or hangs.
        min_workers: with fewer the run does not go on; it waits for replacements, then fails.
        hang_timeout_s: how long a worker may stay at one step while the others wait for it.
        seed: data order and every random number follow from it.
        reproducible: the same bits at every `num_workers`, `num_shards` fixed; the default loop.
        accumulate: global batches that one optimizer step of the default loop consumes; the
            last window of an epoch may be shorter, and counts rightly.
        clip_grad_norm: largest norm of the global gradient, for the default loop. Gradients of
            `lockstep.local` parameters are not part of it, and are not clipped.
        check_finite: a step whose gradients hold NaN or infinity is an error (LS115) that names
            samples and layer, and is not taken; False takes it.
        bucket_cap_mb: size of the buckets that gradients travel in, in MiB.
        checkpoint_dir: a directory of this run's own, on this machine. With it, SIGTERM during
            `train` (in the main thread) saves first.
        checkpoint_every: global batches between two checkpoints, written while training goes on.
        keep_checkpoints: how many of them stay.
        resume: "auto" goes on from the newest good checkpoint in `checkpoint_dir`, if there is
            one; a path from that one. `num_shards` and `seed` come from it.
        memory_checkpoint_every: under ``sync="fsdp"``, global batches between two copies of each
            worker's part of the state in another worker's memory; after a death at most so many
            are computed again (more if both die). "auto": so that the copies take 1 % of the time.
            None: no copies, and a death ends the run.
        shadow_every: in each so many-th step another worker computes one shard as well, with
            ``reproducible=True``; bits that differ are hardware that errs (LS313). Refused with
            tensors that `lockstep.local` marks. 0: in none.
        shadow_limit: a worker that was wrong so often is replaced as if it had died.
        audit: how often ranks are compared: "watch" (the first steps more often, then every 64th),
            "full" (every step, slower), "off".
        callbacks: `Callback` objects.

    Raises:
        ConfigurationError: an argument that cannot be right (a ValueError).
        NotEnoughResourcesError: the cluster has no room for the workers (a TimeoutError).
        Whatever `setup` raises in a worker, as itself, with its rank as a note.
    """

    def __init__(
        self,
        *,
        training_operator_cls: type[TrainingOperator] | None = None,
        initialization_hook: Callable[[], Any] | None = None,
        config: dict[str, Any] | None = None,
        num_workers: int = 1,
        num_shards: int | None = None,
        num_cpus_per_worker: float = 1,
        use_gpu: bool | str = "auto",
        resources_per_worker: Mapping[str, float] | None = None,
        backend: str = "auto",
        sync: str = "replicate",
        wrap_ddp: bool = True,
        timeout_s: float = 1800,
        use_fp16: bool = False,
        precision: str = "fp32",
        use_tqdm: bool = False,
        add_dist_sampler: bool = True,
        scheduler_step_freq: str | None = None,
        use_local: bool = False,
        spare_workers: int = 0,
        min_workers: int = 1,
        hang_timeout_s: float = 60,
        seed: int = DEFAULT_SEED,
        reproducible: bool = False,
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        check_finite: bool = True,
        bucket_cap_mb: float = 25,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int = 3,
        resume: str | os.PathLike[str] | None = None,
        memory_checkpoint_every: int | str | None = "auto",
        shadow_every: int = 0,
        shadow_limit: int = 3,
        audit: str = "watch",
        callbacks: Sequence[Callback] = (),
        **further: Any,
    ) -> None:
        checks.refuse_unknown_arguments(further, known=inspect.signature(TorchTrainer).parameters)
        operator_cls = checks.check_operator(training_operator_cls)
        self.config, explicit = checks.check_config(config), checks.explicit_args(num_shards, seed)
        checks.check_workers(num_workers, num_shards, spare_workers, min_workers)
        needs = Resources(num_cpus_per_worker, resources_per_worker, backend, timeout_s)
        placement = Placement(needs, use_gpu, use_local, spare_workers, min_workers, hang_timeout_s)
        disk = CheckpointDirectory(checkpoint_dir, checkpoint_every, keep_checkpoints, resume, sync)
        callbacks = [*disk.run_logs, *checks.check_functions(initialization_hook, callbacks)]
        self._callbacks = CallbackList(callbacks, self)
        self._steps = StepMetrics(self._callbacks)
        processes, replicas = checks.processes_and_replicas(sync, num_workers)
        way = checks.pick_precision(precision, use_fp16), use_tqdm, scheduler_step_freq, sync
        options = Options(
            *way,
            replicas=replicas,
            wrap_ddp=wrap_ddp,
            add_dist_sampler=add_dist_sampler,
            bucket_cap_mb=bucket_cap_mb,
            reproducible=reproducible,
            accumulate=accumulate,
            clip_grad_norm=clip_grad_norm,
            check_finite=check_finite,
            shadow_every=shadow_every,
            shadow_limit=shadow_limit,
        )
        spec = WorkerSpec(
            operator_cls=operator_cls,
            config=self.config,
            num_workers=processes,
            num_shards=num_shards or num_workers,
            seed=int(seed),
            initialization_hook=initialization_hook,
            threads=max(1, int(num_cpus_per_worker)) if processes > 1 or reproducible else None,
            use_gpu=checks.pick_gpu(use_gpu, backend),
            options=checks.check_options(options, operator_cls, processes, use_local=use_local),
            audit=checks.require_choice("audit", audit, ("off", "watch", "full")),
            memory_checkpoint_every=checks.check_memory_checkpoints(memory_checkpoint_every),
        )
        self._start(spec, placement, disk, explicit)

    def _start(
        self,
        spec: WorkerSpec,
        placement: Placement,
        disk: CheckpointDirectory,
        explicit: Mapping[str, Any],
    ) -> None:
        """Start the workers, and go on from the state that `checkpoint_dir` holds."""
        self._disk = disk
        spec = self._steps.adjust_spec(disk.adjust_spec(spec, explicit))
        spec = placement.resolve_gpus(spec)
        self._audit = AuditComparison(spec)
        engine = start_workers(spec, placement)
        self._workers = WorkerCalls(spec, engine, self._steps.note_change)
        self._dataset = RayDatasetFeed()
        self._state = StateTransfer(self._workers, explicit, self._dataset, self._steps, disk)
        try:
            disk.start_writer(engine)
            self._state.resume()
            self._callbacks.start()
        except BaseException:
            # No trainer is returned that the caller could shut down.
            self._close(force=True, raises_write_error=False)
            raise

    # ------------------------------------------------------------------- training, validation

    def train(
        self,
        num_steps: int | None = None,
        profile: Profile = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: dict[str, Any] | None = None,
        dataset: Any = None,
    ) -> Any:
        """One pass over the training data, or `num_steps` global batches.

        A call with `num_steps` goes on where the last one stopped, across the ends of epochs.

        Args:
            num_steps: global batches; None for the rest of the epoch.
            profile: add ``"profile"``: mean seconds of each phase. As the path of a folder, also
                write a trace of torch's profiler there, from each worker.
            reduce_results: False for a list with each worker's own results, by rank.
            max_retries: failures of workers in this call that the run recovers from.
            info: given to `train_epoch`, and in `batch_info` to `train_batch`.
            dataset: a ``ray.data.Dataset`` (or `lockstep.data.RayBatches`) instead of the loader:
                every row once an epoch, in an order and on workers that Ray chooses.

        Returns:
            ``num_samples``, ``epoch`` (passes begun), ``batch_count`` (global batches), and
            for each metric its mean over all samples and ``last_<metric>`` of the last batch.

        Raises:
            CheckpointWriteError: training went well, and the latest checkpoint could not be
                written to `checkpoint_dir`; ``result`` holds what would have been returned.
        """
        checks.require_count("max_retries", max_retries, least=0)
        self._workers.open_engine()
        self._state.refuse_lost_settings()
        self._dataset.set_dataset(dataset, self._workers)
        request = loop_request("train", num_steps, profile, info)
        if self._dataset.has_dataset:
            max_retries = 0  # Ray gives each row to one worker, and only once
            self._steps.note_change(ON_RAY_DATASET)
        else:
            check_loader(self._workers, "train")
        writer, update = self._disk.claim(), self._state.update_users_objects
        with nullcontext() if writer is None else writer.during_training(self._state.snapshot):
            self._state.renew_checkpoint()
            reports = run_loop(
                self._workers, self._callbacks, self._steps, request, profile, max_retries, update
            )
        self._audit.judge(reports)
        result = reduce_reports(reports, self._callbacks.train_end, reduce_results)
        return result if writer is None else writer.result(result)

    def validate(
        self,
        num_steps: int | None = None,
        profile: Profile = False,
        reduce_results: bool = True,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """One pass over the validation data, or the next `num_steps` global batches of it.

        A call goes on where the last one stopped: behind ``validate(num_steps=5)``, ``validate()``
        is the rest of that pass. Every sample counts once. As `train`, without ``epoch``.
        """
        check_loader(self._workers, "validation")
        request = loop_request("validation", num_steps, profile, info)
        reports = run_loop(self._workers, self._callbacks, self._steps, request, profile)
        return reduce_reports(reports, self._callbacks.validate_end, reduce_results)

    @property
    def should_stop(self) -> bool:
        """Whether a callback has a reason to train no further; see `Callback.stop_reason`."""
        return self._callbacks.want_stop

    def verify(self, num_steps: int = 1) -> ParityReport:
        """Run the next steps on a copy, with all workers and in one process, and compare.

        The run stays where it is, also after an error: every worker makes a second operator (by
        `setup`), and rank 0 a third one, which takes global batches whole, by plain autograd.

        Args:
            num_steps: optimizer steps of the default loop; global batches of a loop of your own.

        Returns:
            ``ok`` (None where what agrees was not held against one process that took the batch
            whole; ``inconclusive`` says why), and in ``rows`` for each parameter the gradient
            that the optimizer found against that of one process: ``relative_error``, ``scale``,
            ``cosine``, and an ``explanation`` in words. It prints as a table. Dropout is
            turned off, also where functions are called for it, and layers that normalise by the
            batch use their running statistics; ``notes`` says so.

        Raises:
            NotAvailableError: workers read loaders of their own (``add_dist_sampler=False``),
                no optimizer stepped, or another number of times in one process.
        """
        return verification.verify_steps(self._workers, num_steps)

    def predict(self, loader: Any) -> list[Any]:
        """The model's outputs for every sample of `loader`, each once; see `predict_batch`.

        ::

            outputs = torch.stack(trainer.predict(DataLoader(dataset, batch_size=64)))

        Args:
            loader: a loader as `register_data` takes it; it is sent to the workers. An incomplete
                last batch is read also with ``drop_last=True``.

        Returns:
            One item per sample, tensors on the CPU. Item i is that of ``dataset[i]``, also if the
            loader shuffles; where its sampler leaves samples out or repeats some, and for streams,
            items come in the loader's order.

        Raises:
            NotShardableError: the loader cannot be shared out so that each sample is seen once.
            ConfigurationError: `predict_batch` returned something without one row per sample.
            Whatever the model raises; the run is as it was.
        """
        return order_predictions(self._workers.call(predict.with_args(loader)), loader)

    def update_scheduler(self, metric: float) -> None:
        """Step every registered scheduler, with `metric` where its `step` has that parameter."""
        self._workers.refuse_without_schedulers()
        self._workers.call(Worker.update_scheduler.with_args(metric))

    def status(self) -> dict[str, Any]:
        """How many workers there are, and what happened to them.

        Returns:
            ``workers``, ``spares`` (ready ones), ``shards``, ``generation`` (formations of the
            group, from 0), ``epoch`` (passes begun), ``epochs_finished``, ``step`` (global
            batches), ``units`` (of ``register(shard=...)``, by name), ``recoveries`` (one dict
            each: ``lost``, ``why``, ``during``, ``step``, ``replayed``, ``seconds``,
            ``generation``, ``workers``, ``same_bits``, ``checkpoint`` (on the disk, if the run went
            back to one), ``at``, in seconds since 1970), ``shadow`` (``checked`` shards; of each
            ``wrong`` one ``step``, ``shard``, ``worker``, ``host``, ``device``, ``tensor``).
        """
        return self._workers.summary()

    def replay(self, step: int, *, num_workers: int = 1, shard: int | None = None) -> ReplayReport:
        """Compute a step of this run again, and compare it with the log in `checkpoint_dir`.

        The run stays where it is. ``lockstep replay`` does the same without a trainer.

        Args:
            step: global batches since the run began, this one included.
            num_workers: with one, the step is computed in this process.
            shard: compare this shard's loss alone.

        Returns:
            ``same_bits``, ``differences``, ``reasons``; it prints as a few lines.

        Raises:
            ConfigurationError: there is no log, or it does not know the step.
            CheckpointError: no checkpoint in front of the step can be read; or there is none, and
                the first weights of an instance given to `from_model` are gone.
        """
        spec = self._workers.settled_spec()
        return replay_run(
            trainer_maker(TorchTrainer, spec.operator_cls, spec.initialization_hook, is_here=True),
            folder=self._disk.log_folder,
            step=step,
            config=self.config,
            num_workers=num_workers,
            shard=shard,
        )

    # --------------------------------------------------------------------- the state of the run

    def get_model(self) -> nn.Module | list[nn.Module]:
        """A copy of the trained model on the CPU: a plain module, loadable without lockstep.

        A list if `register` was given a list or tuple of models.
        """
        return self._state.models()

    def get_averaged_model(self) -> nn.Module | list[nn.Module]:
        """As `get_model`, with the averages that ``register(ema=...)`` keeps of the weights.

        Raises:
            ConfigurationError: the operator registered without `ema`.
        """
        return self._workers.call_rank_0(Worker.averaged_models.with_args())

    def get_local_operator(self) -> TrainingOperator:
        """The operator in this process: with one worker, or with ``use_local=True``.

        To change what trains, use `apply_all_operators`: where a window of `accumulate` is open, it
        takes the run back to the window's beginning first, and an undo keeps the change.
        """
        return self._workers.required_local_operator()

    def state_dict(self) -> dict[str, Any]:
        """Everything that another trainer needs to go on from here: plain tensors and Python."""
        return self._state.take()

    def load_state_dict(self, state: Mapping[str, Any], blocking: bool = True) -> None:
        """Go on from `state` in every worker.

        Blocks until every worker has taken it over (`blocking` is RaySGD's name; False is
        refused, because no call would raise a failure). On an error nothing changes.

        Raises:
            CheckpointError: it is of another model or optimizer, or of another `num_shards` or
                `seed` than the trainer was explicitly given.
            DataOrderError: in the middle of its epoch no batch of the present size ends there.
        """
        checks.require(blocking is True, "blocking", blocking, "True")
        self._state.load(state)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write `state_dict()` on this machine, into one file (a directory under ``fsdp``)."""
        return self._state.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file of `save`, check it, and go on from it in every worker.

        Raises:
            CheckpointError: see `lockstep.checkpoint.read` and `load_state_dict`; the
                trainer is as it was.
        """
        self._state.read(path)

    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Call ``fn()`` in every worker's process; results by rank.

        An exception of `fn` arrives as itself. The run goes on, if the others have come to their
        end within two seconds; else the workers end: `fn` may wait for ranks that will not come.
        """
        return self._workers.call(Worker.call.with_args(fn))

    def apply_all_operators(self, fn: Callable[[TrainingOperator], Any]) -> list[Any]:
        """Call ``fn(operator)`` in every worker; results by rank. As `apply_all_workers`."""
        return self._workers.call(Worker.call_with_operator.with_args(fn))

    as_trainable = classmethod(as_trainable)

    # ---------------------------------------------------------------------------------- ending

    def shutdown(self, force: bool = False) -> None:
        """End the workers and free what they used; later calls raise `TrainerClosedError`.

        Args:
            force: kill them instead of letting them close loaders and connections first.

        Raises:
            WrongUseError: a call runs, in another thread or below a signal handler.
        """
        if not self._workers.begin_shutdown():
            return
        failure = self._workers.failure
        try:
            if failure is not None:
                # Close again: a second Ctrl-C may have interrupted an earlier close.
                self._workers.refuse_calls()
                self._callbacks.failure(failure)
                return
            # Before the workers end: a callback may save.
            self._callbacks.shutdown()
            if not force:
                self._state.renew_checkpoint()
                self._workers.end_operators()
        finally:
            self._close(force=force or failure is not None, raises_write_error=not force)

    def _close(self, *, force: bool, raises_write_error: bool) -> None:
        """End the workers, and the thread that writes checkpoints."""
        with ExitStack() as afterwards:
            afterwards.callback(self._dataset.forget)
            afterwards.callback(self._disk.close, raises=raises_write_error)
            self._workers.close(force=force)

    def __enter__(self) -> TorchTrainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None:
                self._callbacks.failure(error)
        finally:
            self.shutdown(force=error is not None)
