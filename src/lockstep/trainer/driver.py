# SPDX-License-Identifier: Apache-2.0
"""`TorchTrainer`: the driver's side."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from lockstep import checkpoint
from lockstep.engine import Resources, open_engine
from lockstep.errors import (
    CheckpointError,
    ConfigurationError,
    NotAvailableError,
    WrongTypeError,
)
from lockstep.operator import Options, TrainingOperator
from lockstep.trainer import results, verification
from lockstep.trainer.arguments import (
    UNSAID_SEED,
    check_options,
    checked_config,
    checked_functions,
    checked_numbers,
    checked_operator,
    checked_resources,
    checked_workers,
    is_int,
    is_positive_int,
    pick_backend,
    pick_gpu,
    pick_precision,
    pick_sync,
    processes_and_replicas,
    refuse_further,
    require,
)
from lockstep.trainer.feeding import Feeding
from lockstep.trainer.progress import ProgressBar, wants_bar
from lockstep.trainer.refusals import check_loader, has_ended, no_batch, two_calls, was_shut_down
from lockstep.worker import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from torch import nn

    from lockstep.parity import ParityReport
    from lockstep.trainer.callbacks import Callback
    from lockstep.worker import Report

_NOT_YET: Final = frozenset({"predict", "status"})


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
        num_workers: processes that train; changes the speed, not the result.
        num_shards: parts that every global batch is cut into; `num_workers` if None.
        num_cpus_per_worker: CPUs, and threads of torch, for each worker.
        use_gpu: True, False, or "auto": whether CUDA is available here.
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
        use_local: rank 0 runs in this process, so that a breakpoint in it works.
        seed: data order and every random number follow from it.
        reproducible: the same bits at every `num_workers`, `num_shards` fixed; the default loop.
        accumulate: global batches that one optimizer step of the default loop consumes; the
            last window of an epoch may be shorter, and counts rightly.
        clip_grad_norm: largest norm of the global gradient, for the default loop.
        bucket_cap_mb: size of the buckets that gradients travel in, in MiB.
        callbacks: `Callback` objects.

    Raises:
        ConfigurationError: an argument that cannot be right (a ValueError).
        NotEnoughResourcesError: the cluster has no room for the workers (a TimeoutError).
        Whatever `setup` raises in a worker, as itself, with its rank as a note.
    """

    def __init__(
        self,
        *,
        training_operator_cls: type[TrainingOperator],
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
        seed: int = UNSAID_SEED,
        reproducible: bool = False,
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        bucket_cap_mb: float = 25,
        callbacks: Sequence[Callback] = (),
        **further: Any,
    ) -> None:
        self._engine: Any = None
        self._calling = threading.Lock()
        self._feeding = Feeding()
        refuse_further(further, known=inspect.signature(TorchTrainer).parameters)
        self._operator_cls = checked_operator(training_operator_cls)
        self.config = checked_config(config)
        checked_workers(num_workers, num_shards, num_cpus_per_worker)
        checked_resources(resources_per_worker)
        checked_numbers(timeout_s=timeout_s)
        require(is_int(seed), "seed", seed, "an int")
        checked_functions(initialization_hook, callbacks)
        gpu, gpu_here = pick_gpu(use_gpu)
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
        )
        check_options(options, self._operator_cls, use_local=use_local)
        self._callbacks = tuple(callbacks)
        self._explicit = {"num_shards": num_shards, "seed": None if seed is UNSAID_SEED else seed}
        self._spec = WorkerSpec(
            operator_cls=self._operator_cls,
            config=self.config,
            num_workers=processes,
            num_shards=num_shards or num_workers,
            seed=int(seed),
            initialization_hook=initialization_hook,
            threads=num_cpus_per_worker if processes > 1 or reproducible else None,
            use_gpu=gpu,
            options=options,
        )
        resources = Resources(
            num_cpus=num_cpus_per_worker,
            num_gpus=int(gpu) * replicas,
            further=resources_per_worker,
            backend=pick_backend(backend, gpu),
            timeout_s=timeout_s,
        )
        self._open(resources, use_local=use_local, gpu_here=gpu_here)

    def _open(self, resources: Resources, *, use_local: bool, gpu_here: bool) -> None:
        self._engine = open_engine(self._spec, resources, use_local=use_local, gpu_here=gpu_here)
        try:
            self._tell("on_start")
        except BaseException:
            # Nobody gets hold of a trainer whose construction failed.
            engine, self._engine = self._engine, None
            engine.close(force=True)
            raise

    # ------------------------------------------------------------------- training, validation

    def train(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: dict[str, Any] | None = None,
        dataset: Any = None,
    ) -> Any:
        """One pass over the training data, or `num_steps` global batches.

        A call with `num_steps` goes on where the last one stopped, across the ends of epochs.

        Args:
            num_steps: global batches; None for the rest of the epoch.
            profile: add ``"profile"``: mean seconds of each phase.
            reduce_results: False for a list with each worker's own results, by rank.
            max_retries: accepted for RaySGD's sake; a worker's death is an error as yet.
            info: given to `train_epoch`, and in `batch_info` to `train_batch`.
            dataset: a ``ray.data.Dataset`` (or `lockstep.data.RayBatches`) instead of the loader:
                every row once an epoch, in an order and on workers that Ray chooses.

        Returns:
            ``num_samples``, ``epoch`` (passes begun), ``batch_count`` (global batches), and
            for each metric its mean over all samples and ``last_<metric>`` of the last batch.
        """
        self._check_open()
        self._feeding.change_to(dataset, self._spec, self._call)
        reports = self._loop("train", num_steps, profile, info)
        self._give_back()
        return self._announced("on_train_end", reports, reduce_results)

    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
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
        self, purpose: str, num_steps: int | None, profile: bool, info: Mapping[str, Any] | None
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
        with self._bar(purpose, num_steps) as watch:
            reports = self._call(method, num_steps, profile, dict(info or {}), watch=watch)
        if not any(report.steps for report in reports):
            raise no_batch(self._operator_cls.__name__, purpose)
        return reports

    def _announced(self, event: str, reports: Sequence[Report], reduce_results: bool) -> Any:
        """What the call returns; callbacks hear of the reduced results in either case."""
        reduced = results.merged(reports)
        self._tell(event, reduced)
        return reduced if reduce_results else [results.merged([report]) for report in reports]

    @contextlib.contextmanager
    def _bar(
        self, purpose: str, num_steps: int | None
    ) -> Iterator[Callable[[dict[str, Any]], None] | None]:
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
            ``ok``, and in ``rows`` for each parameter the gradient that the optimizer found
            against that of one process: ``relative_error``, ``scale``, ``cosine``, and an
            ``explanation`` in words. It prints as a table. Dropout is turned off and layers
            that normalise by the batch use their running statistics; ``notes`` says so.

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

    # -------------------------------------------------------------------------------- state

    def get_model(self) -> nn.Module | list[nn.Module]:
        """A copy of the trained model on the CPU: a plain module, loadable without lockstep.

        A list if `register` was given a list or tuple of models.
        """
        model: nn.Module | list[nn.Module] = self._from_rank_0("models")
        return model

    def get_local_operator(self) -> TrainingOperator:
        """The operator in this process: with one worker, or with ``use_local=True``."""
        self._check_open()
        operator = self._engine.local_operator()
        if operator is None:
            raise ConfigurationError(
                "no operator lives in this process",
                fix="TorchTrainer(..., use_local=True), or trainer.apply_all_operators(fn)",
            )
        found: TrainingOperator = operator
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that another trainer needs to go on from here: plain tensors and Python."""
        state: dict[str, Any] = self._from_rank_0("state_dict")
        if self._spec.num_workers > 1 and self._operator_cls._brings("state_dict"):
            state["operator_by_rank"] = self._call("operator_state")
        return state

    def load_state_dict(self, state: Mapping[str, Any], blocking: bool = True) -> None:
        """Go on from `state` in every worker.

        Blocks until every worker has taken it over (`blocking` is RaySGD's name; False is
        refused, because a failure would be noticed by nobody). On an error nothing changes.

        Raises:
            CheckpointError: it is of another model, or of another `num_shards` or `seed`
                than the trainer was explicitly given.
        """
        require(blocking is True, "blocking", blocking, "True")
        self._check_open()
        if not isinstance(state, Mapping):
            raise CheckpointError(
                "this is not the state of a trainer",
                expected="what trainer.state_dict() returned",
                got=f"{type(state).__name__}: {state!r:.60}",
            )
        for name, explicit in self._explicit.items():
            if explicit is not None and state.get(name, explicit) != explicit:
                raise CheckpointError(
                    f"the state was made with another {name}",
                    expected=f"{name}={explicit}, as the trainer was told",
                    got=f"{name}={state[name]}",
                    fix=f"leave {name} out: it is taken from the state",
                )
        self._feeding.change_to(None, self._spec, self._call)
        self._call("check_state", state)
        try:
            self._call("apply_state", state)
        except BaseException:
            if self._engine.ended is None:
                self._call("settle_state", False)
            raise
        self._call("settle_state", True)
        self._give_back()

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write `state_dict()` on this machine, into one file (a directory under ``fsdp``)."""
        in_shards = self._spec.options.sync == "fsdp"
        write = checkpoint.write_directory if in_shards else checkpoint.write
        return write(os.fspath(path), self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file of `save`, check it, and go on from it in every worker.

        Raises:
            CheckpointError: see `lockstep.checkpoint.read` and `load_state_dict`; the
                trainer is as it was.
        """
        self._check_open()
        self.load_state_dict(checkpoint.read(os.fspath(path)))

    def _give_back(self) -> None:
        """Objects handed over by `from_model` hold the trained state after every change."""
        absorb = getattr(self._operator_cls, "_absorb", None)
        if absorb is not None and self._engine.local_operator() is None:
            absorb(self._from_rank_0("state_dict"))

    # ------------------------------------------------------------------------ users' functions

    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Call ``fn()`` in every worker's process; results by rank."""
        return self._call("call", fn)

    def apply_all_operators(self, fn: Callable[[TrainingOperator], Any]) -> list[Any]:
        """Call ``fn(operator)`` in every worker; results by rank."""
        return self._call("call_with_operator", fn)

    @classmethod
    def as_trainable(cls, *args: Any, **kwargs: Any) -> Any:
        """Not in this version: a Ray Tune trainable around a trainer."""
        raise NotAvailableError(
            "TorchTrainer.as_trainable is not in this version",
            fix="give Tune a function that builds a TorchTrainer and reports train()'s result",
        )

    # ---------------------------------------------------------------------------------- ending

    def shutdown(self, force: bool = False) -> None:
        """End the workers and free what they used; later calls raise `TrainerClosedError`.

        Args:
            force: kill them instead of letting them close loaders and connections first.
        """
        engine = self._engine
        if engine is None:
            return
        if engine.ended is not None:
            # Closed already; once more, for a second Ctrl-C may have interrupted that.
            self._engine = None
            engine.close(force=True)
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
            self._feeding.forget()

    def __enter__(self) -> TorchTrainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown(force=error is not None)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_YET:
            raise AttributeError(f"TorchTrainer has no {name} in this version of lockstep")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _tell(self, event: str, *results: dict[str, Any]) -> None:
        for callback in self._callbacks:
            # A copy for each: what one takes out of it the next, and the caller, still get.
            getattr(callback, event)(self, *map(dict, results))

    def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self._check_open()
        with self._one_call_at_a_time(method):
            answers: list[Any] = self._engine.call(method, *args, **kwargs)
        return answers

    def _call_rank(self, rank: int, method: str, *args: Any) -> Any:
        self._check_open()
        with self._one_call_at_a_time(method):
            return self._engine.call_rank(rank, method, *args)

    def _from_rank_0(self, method: str) -> Any:
        if self._spec.options.sync == "fsdp":
            return self._call("whole", method)[0]  # each rank has a part of it
        return self._call_rank(0, method)

    @contextlib.contextmanager
    def _one_call_at_a_time(self, method: str) -> Iterator[None]:
        """Two calls at once would take turns with the batches, the model and the metrics."""
        if not self._calling.acquire(blocking=False):
            raise two_calls(method)
        try:
            yield
        finally:
            self._calling.release()

    def _check_open(self) -> None:
        if self._engine is None:
            raise was_shut_down()
        if self._engine.ended is not None:
            reason = self._engine.ended
            raise has_ended(reason) from reason
