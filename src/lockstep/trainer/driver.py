# SPDX-License-Identifier: Apache-2.0
"""`TorchTrainer`: the driver's side."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.engine import Resources, has_gpus_elsewhere, open_remote, stays_here
from lockstep.engine.inline import InlineEngine
from lockstep.errors import WrongTypeError
from lockstep.operator import Options, TrainingOperator
from lockstep.trainer import results, verification
from lockstep.trainer.arguments import (
    UNSAID_SEED,
    check_options,
    checked_config,
    checked_functions,
    checked_numbers,
    checked_operator,
    checked_workers,
    explicit_identity,
    is_int,
    is_positive_int,
    pick_audit,
    pick_backend,
    pick_gpu,
    pick_precision,
    pick_sync,
    processes_and_replicas,
    refuse_further,
    require,
)
from lockstep.trainer.audit_comparison import AuditComparison
from lockstep.trainer.beside import BesideTraining
from lockstep.trainer.call_errors import check_loader, no_batch
from lockstep.trainer.call_listeners import all_of, announcer_for
from lockstep.trainer.failure_tolerance import policy_of, recovering, refuse_spares
from lockstep.trainer.profiling import Profile, traced
from lockstep.trainer.progress import ProgressBar, wants_bar
from lockstep.trainer.step_metrics import StepMetrics
from lockstep.worker import WorkerSpec

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from lockstep.parity import ParityReport
    from lockstep.trainer.callbacks import Callback
    from lockstep.worker import Report


class TorchTrainer(BesideTraining):
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
        num_cpus_per_worker: CPUs, and threads of torch, for each worker.
        use_gpu: True, False, or "auto": whether CUDA is available here, or other machines of the
            cluster have a GPU for every worker.
        resources_per_worker: further Ray resources for each worker, by name.
        backend: "nccl", "gloo", or "auto": nccl on GPUs.
        sync: how N gradients become one; "replicate" (hooks on the parameters), "ddp", "fsdp",
            "parameter_server" (one owner), "data_parallel" (`num_workers` devices, one process).
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
        clip_grad_norm: largest norm of the global gradient, for the default loop.
        check_finite: a step whose gradients hold NaN or infinity is an error (LS115) that names
            samples and layer, and is not taken; False takes it.
        bucket_cap_mb: size of the buckets that gradients travel in, in MiB.
        checkpoint_dir: a directory of this run's own, on this machine. With it, SIGTERM during
            `train` (in the main thread) saves first.
        checkpoint_every: global batches between two checkpoints, written while training goes on.
        keep_checkpoints: how many of them stay.
        resume: "auto" goes on from the newest good checkpoint in `checkpoint_dir`, if there is
            one; a path from that one. `num_shards` and `seed` come from it.
        audit: "watch", "full" (every step, at a cost) or "off": what looks whether replicas agree.
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
        num_cpus_per_worker: int = 1,
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
        seed: int = UNSAID_SEED,
        reproducible: bool = False,
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        check_finite: bool = True,
        bucket_cap_mb: float = 25,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int = 3,
        resume: str | os.PathLike[str] | None = None,
        audit: str = "watch",
        callbacks: Sequence[Callback] = (),
        **further: Any,
    ) -> None:
        super().__init__()
        refuse_further(further, known=inspect.signature(TorchTrainer).parameters)
        self._operator_cls = checked_operator(training_operator_cls)
        self.config, self._explicit = checked_config(config), explicit_identity(num_shards, seed)
        checked_workers(num_workers, num_shards, num_cpus_per_worker, resources_per_worker)
        checked_numbers(timeout_s=timeout_s, hang_timeout_s=hang_timeout_s)
        self._policy = policy_of(num_workers, spare_workers, min_workers, hang_timeout_s)
        self._steps = StepMetrics(checked_functions(initialization_hook, callbacks))
        processes, replicas = processes_and_replicas(pick_sync(sync), num_workers)
        options = Options(
            precision=pick_precision(precision, use_fp16),
            use_tqdm=use_tqdm,
            scheduler_step_freq=scheduler_step_freq,
            sync=sync,
            replicas=replicas,
            wrap_ddp=wrap_ddp,
            add_dist_sampler=add_dist_sampler,
            bucket_cap_mb=bucket_cap_mb,
            reproducible=reproducible,
            accumulate=accumulate,
            clip_grad_norm=clip_grad_norm,
            check_finite=check_finite,
        )
        check_options(options, self._operator_cls, use_local=use_local)
        gpu, gpu_here = pick_gpu(use_gpu, backend)
        spec = WorkerSpec(
            operator_cls=self._operator_cls,
            config=self.config,
            num_workers=processes,
            num_shards=num_shards or num_workers,
            seed=int(seed),
            initialization_hook=initialization_hook,
            threads=num_cpus_per_worker if processes > 1 or reproducible else None,
            use_gpu=gpu,
            options=options,
            audit=pick_audit(audit),
            log_every=self._steps.every,
        )
        self._spec = self._fitted(spec, checkpoint_dir, checkpoint_every, keep_checkpoints, resume)
        self._look_for_gpus(use_gpu, use_local, spare_workers)
        room = self._room(num_cpus_per_worker, resources_per_worker, backend, timeout_s)
        self._open(room, gpu_here=gpu_here, use_local=use_local, num_spares=spare_workers)

    def _look_for_gpus(self, use_gpu: bool | str, use_local: bool, num_spares: int) -> None:
        """A driver often runs on a head node without any: "auto" asks the other machines too."""
        refuse_spares(self._spec, num_spares)  # before a Ray is started that would tell
        num_bundles = 0 if use_local else self._spec.num_workers + num_spares
        if use_gpu == "auto" and not self._spec.use_gpu and num_bundles > 1:
            self._spec = replace(self._spec, use_gpu=has_gpus_elsewhere(num_bundles))

    def _room(
        self, num_cpus: int, further: Mapping[str, float] | None, backend: str, timeout_s: float
    ) -> Resources:
        gpu = self._spec.use_gpu
        gpus = int(gpu) * self._spec.options.replicas
        return Resources(num_cpus, gpus, further, pick_backend(backend, gpu), timeout_s)

    def _open(
        self, resources: Resources, *, gpu_here: bool, use_local: bool, num_spares: int
    ) -> None:
        self._watched = AuditComparison(self._spec)
        if stays_here(self._spec, resources, use_local=use_local, gpu_here=gpu_here):
            self._engine = InlineEngine(self._spec)
        else:
            engine = open_remote(self._spec, resources, use_local=use_local, num_spares=num_spares)
            self._engine = recovering(engine, self._policy)
        try:
            self._begin_durably()
            self._tell("on_start")
        except BaseException:
            # Nobody gets hold of a trainer whose construction failed.
            engine, self._engine = self._engine, None
            engine.close(force=True)
            self._all_written(force=True)
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
        require(is_int(max_retries) and max_retries >= 0, "max_retries", max_retries, "an int >= 0")
        self._check_open()
        generation = self._engine.roster().generation
        self._feeding.change_to(dataset, self._spec, self._call, generation)
        # Ray decides who reads which rows, and gives none of them out again.
        retries = 0 if self._feeding.has_dataset else max_retries
        with self._saving_meanwhile():
            reports = self._loop("train", num_steps, profile, info, retries=retries)
        self._watched.judge(reports)
        self._give_back()
        return self._saved(self._announced("on_train_end", reports, reduce_results))

    def validate(
        self,
        num_steps: int | None = None,
        profile: Profile = False,
        reduce_results: bool = True,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """One pass over the validation data, or `num_steps` global batches of it.

        Every sample counts exactly once, at any number of workers. Arguments and result are
        those of `train`, without ``epoch``.
        """
        reports = self._loop("validation", num_steps, profile, info)
        return self._announced("on_validate_end", reports, reduce_results)

    def _loop(
        self,
        purpose: str,
        num_steps: int | None,
        profile: Profile,
        info: Mapping[str, Any] | None,
        retries: int = 3,
    ) -> list[Report]:
        self._check_open()
        require(
            num_steps is None or is_positive_int(num_steps),
            "num_steps",
            num_steps,
            "a positive number of global batches, or None",
        )
        if not isinstance(info, dict | None):
            raise WrongTypeError("info is not a dict", got=f"{type(info).__name__}: {info!r:.60}")
        if purpose != "train" or not self._feeding.has_dataset:
            check_loader(self._engine.started, self._operator_cls.__name__, purpose)
        method = "train" if purpose == "train" else "validate"
        arguments = num_steps, bool(profile), dict(info or {})
        with (
            traced(self, profile, method),
            self._bar(purpose, num_steps) as bar,
        ):
            listeners = announcer_for(self, self._callbacks, purpose, self._steps)
            watch = all_of(bar, listeners.watch if listeners is not None else None)
            reports = self._call(method, *arguments, watch=watch, retries=retries)
            if listeners is not None:
                listeners.finish(reports)
        if not any(report.steps for report in reports):
            raise no_batch(self._operator_cls, purpose, self._engine.started)
        return reports

    def _announced(self, event: str, reports: Sequence[Report], reduce_results: bool) -> Any:
        """What the call returns; callbacks hear of the reduced results in either case."""
        results.refuse_unused_metrics(reports)
        reduced = results.merged(reports)
        self._tell(event, reduced)
        if reduce_results:
            return reduced
        living = [report for report in reports if not report.is_of_a_lost_worker]
        return [results.merged([report]) for report in living]

    @contextlib.contextmanager
    def _bar(
        self, purpose: str, num_steps: int | None
    ) -> Iterator[Callable[[dict[str, Any]], int] | None]:
        if not wants_bar(self._spec.options.use_tqdm):
            yield None
            return
        total = self._call_rank(0, "steps_ahead", purpose, num_steps)
        with ProgressBar(purpose, total) as bar:
            yield bar.watch

    def verify(self, num_steps: int = 1) -> ParityReport:
        """Run the next steps on a copy, with all workers and in one process, and compare.

        The run stays where it is, also after an error: every worker makes a second operator
        (`setup` runs again, in the same process) and rank 0 a third one, which takes the
        workers' global batches whole, by plain autograd.

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
        self._check_open()
        require(is_positive_int(num_steps), "num_steps", num_steps, "a positive number of steps")
        verification.refuse_unverifiable(self._spec)
        check_loader(self._engine.started, self._operator_cls.__name__, "train")
        return verification.report(self._call("verify", num_steps), self._spec)

    def update_scheduler(self, metric: float) -> None:
        """Step every registered scheduler, giving `metric` to those that take one."""
        self._call("update_scheduler", metric)

    def status(self) -> dict[str, Any]:
        """Who is there, and what happened.

        Returns:
            ``workers``, ``spares`` (ready ones), ``shards``, ``generation`` (formations of the
            group, from 0), ``epoch`` (passes begun), ``epochs_finished``, ``step`` (global
            batches), ``recoveries`` (one dict each: ``lost``, ``why``, ``during``, ``step``,
            ``replayed``, ``seconds``, ``generation``, ``workers``, ``same_bits``, and ``at``, in
            seconds since 1970).
        """
        epoch, finished, step = self._call_rank(0, "position")
        roster = self._engine.roster()
        return {
            "workers": roster.workers,
            "spares": roster.spares,
            "shards": self._spec.num_shards,
            "generation": roster.generation,
            "epoch": epoch,
            "epochs_finished": finished,
            "step": step,
            "recoveries": list(roster.recoveries),
        }

    # ------------------------------------------------------------------------ users' functions

    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Call ``fn()`` in every worker's process; results by rank.

        An exception of `fn` arrives as itself. The run goes on, if the others have come to their
        end within two seconds; else the workers end: `fn` may wait for ranks that will not come.
        """
        return self._call("call", fn)

    def apply_all_operators(self, fn: Callable[[TrainingOperator], Any]) -> list[Any]:
        """Call ``fn(operator)`` in every worker; results by rank. As `apply_all_workers`."""
        return self._call("call_with_operator", fn)

    # ---------------------------------------------------------------------------------- ending

    def shutdown(self, force: bool = False) -> None:
        """End the workers and free what they used; later calls raise `TrainerClosedError`.

        Args:
            force: kill them instead of letting them close loaders and connections first.
        """
        engine = self._engine
        if engine is None:
            return
        if (failure := engine.ended or engine.left) is not None:
            # Closed already, perhaps; once more, for a second Ctrl-C may have interrupted that.
            self._engine = None
            try:
                self._tell_failure(failure)
            finally:
                engine.close(force=True)
                self._all_written(force=force)
                self._feeding.forget()
            return
        try:
            # While calls still work: a callback may save.
            self._tell("on_shutdown")
            farewell = getattr(self._operator_cls, "_end", None)
            if farewell is not None and not force:
                self._call("call_with_operator", farewell)
        finally:
            self._engine = None
            engine.close(force=force)
            self._all_written(force=force)
            self._feeding.forget()

    def __enter__(self) -> TorchTrainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self._tell_failure(error)
        finally:
            self.shutdown(force=error is not None)
