# SPDX-License-Identifier: Apache-2.0
"""Checks the trainer's arguments before anything starts; an error says what to type instead."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeGuard, cast, get_args

import torch

from lockstep.errors import ConfigurationError, WrongTypeError
from lockstep.keys import BATCH_SIZE, VALID_SCHEDULER_STEP
from lockstep.operator import TrainingOperator
from lockstep.operator.custom_loop_refusals import CUSTOM_LOOP_FIXES, requested_loop_options
from lockstep.operator.mixed_precision import PrecisionName
from lockstep.trainer.callbacks import Callback
from lockstep.trainer.unused_definitions import refuse_unused_methods

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lockstep.operator import Options


class _DefaultSeed(int):
    """The type of the default seed, so that a checkpoint's seed replaces it, but no explicit 0."""


_DEFAULT_LOOP: Final = (TrainingOperator.train_batch, TrainingOperator.train_epoch)

DEFAULT_SEED: Final = _DefaultSeed(0)

_FROM_CREATORS: Final = "write training_operator_cls=TrainingOperator.from_creators(...)"
_REMOVED_ARGUMENTS: Final = {
    "apex_args": "apex is not used any more; write precision='bf16' or precision='fp16'",
    "num_replicas": "write num_workers=...",
    "batch_size": "put it into config: config={lockstep.keys.BATCH_SIZE: 64}",
    "model_creator": _FROM_CREATORS,
    "optimizer_creator": _FROM_CREATORS,
    "data_creator": _FROM_CREATORS,
    "loss_creator": _FROM_CREATORS,
    "scheduler_creator": _FROM_CREATORS,
    "data_loader_args": "make the DataLoader yourself, in setup",
    "serialize_data_creation": "TrainingOperator.from_creators(..., serialize_data_creation=True)",
}


def require(is_valid: bool, name: str, got: Any, expected: str, fix: str | None = None) -> None:
    """Raise a ConfigurationError for `got`, the value of the argument `name`, unless `is_valid`."""
    if not is_valid:
        raise ConfigurationError(
            f"{name} cannot be {got!r}", expected=expected, got=f"{name}={got!r}", fix=fix
        )


def require_count(
    name: str, value: Any, *, least: int = 1, optional: bool = False, expected: str | None = None
) -> None:
    """Refuse a `value` of the argument `name` that is no int of at least `least`.

    Args:
        optional: None is right, too.
        expected: the error's words for what is right, instead of "an int, 1 or more".
    """
    if not (optional and value is None):
        words = f"an int, {least} or more{', or None' if optional else ''}"
        require(is_int(value) and value >= least, name, value, expected or words)


def require_choice(name: str, value: Any, choices: Sequence[object]) -> Any:
    """`value`, the value of the argument `name`, if it is one of `choices`."""
    *most, last = [f'"{each}"' if isinstance(each, str) else f"{each}" for each in choices]
    require(value in choices, name, value, f"{', '.join(most)} or {last}")
    return value


def refuse_unknown_arguments(arguments: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse arguments that no trainer has, or that only RaySGD had."""
    for name, value in arguments.items():
        if name in _REMOVED_ARGUMENTS:
            raise ConfigurationError(
                f"TorchTrainer takes no {name}",
                got=f"{name}={value!r:.60}",
                fix=_REMOVED_ARGUMENTS[name],
            )
        alike = difflib.get_close_matches(name, list(known), n=1)
        fix = f"did you mean {alike[0]}?" if alike else None
        for method in (TrainingOperator.register, TrainingOperator.register_data):
            if name in inspect.signature(method).parameters:
                fix = f"give it to self.{method.__name__}({name}=...) in the operator's setup"
        raise WrongTypeError(f"TorchTrainer has no argument {name!r}", fix=fix)


def check_operator(given: Any) -> type[TrainingOperator]:
    """`given`, if it is an operator class without methods that would never be called."""
    if inspect.isclass(given) and issubclass(given, TrainingOperator):
        refuse_unused_methods(given)
        return given
    if given is None:
        raise WrongTypeError(
            "TorchTrainer needs training_operator_cls",
            expected="a subclass of TrainingOperator, whose setup makes model, optimizer and data",
            fix="TorchTrainer(training_operator_cls=MyOperator); from functions:"
            " TrainingOperator.from_creators(model_creator, optimizer_creator, data_creator)",
        )
    instance = isinstance(given, TrainingOperator)
    raise WrongTypeError(
        "training_operator_cls is not a TrainingOperator class",
        expected="a subclass of TrainingOperator",
        got=f"an instance of {type(given).__name__}" if instance else f"{given!r:.80}",
        cause="every worker makes an instance of its own" if instance else None,
        fix=f"training_operator_cls={type(given).__name__}"
        if instance
        else "class MyOperator(lockstep.TrainingOperator): ...",
    )


def check_config(config: Any) -> dict[str, Any]:
    """`config`, if it is a dict whose batch size can be right; an empty one for None."""
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise WrongTypeError(
            "config is not a dict",
            expected="a dict, given to setup(config)",
            got=f"{type(config).__name__}: {config!r:.60}",
        )
    whole, expected = config.get(BATCH_SIZE), "the global batch size: a positive int"
    require_count("config[BATCH_SIZE]", whole, optional=True, expected=expected)
    return config


def check_workers(num_workers: Any, num_shards: Any, spare_workers: Any, min_workers: Any) -> None:
    """Refuse numbers of workers, shards and spares that cannot be right."""
    require_count("num_workers", num_workers)
    _check_spares(num_workers, spare_workers, min_workers)
    require_count("num_shards", num_shards, optional=True)
    require(
        num_shards is None or num_shards >= num_workers,
        "num_shards",
        num_shards,
        f"at least num_workers={num_workers}: every worker carries a shard",
        fix=f"num_workers={num_shards}, or num_shards={num_workers}",
    )


def is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def explicit_args(num_shards: Any, seed: Any) -> dict[str, Any]:
    """`num_shards` and `seed`, which decide data order and random numbers; None if not given."""
    require(is_int(seed), "seed", seed, "an int")
    return {"num_shards": num_shards, "seed": None if seed is DEFAULT_SEED else seed}


def check_numbers(**arguments: Any) -> None:
    """Refuse arguments that are no numbers above zero."""
    for name, value in arguments.items():
        require(_is_above_zero(value), name, value, "a number above zero")


def _is_above_zero(value: Any) -> bool:
    """Whether `value` is a number, one of numpy's, say, and above zero."""
    if isinstance(value, bool | str):
        return False
    try:
        return float(value) > 0
    except (TypeError, ValueError):
        return False


def _check_spares(num_workers: int, spare_workers: Any, min_workers: Any) -> None:
    require_count("spare_workers", spare_workers, least=0)
    require(
        is_int(min_workers) and 1 <= min_workers <= num_workers,
        "min_workers",
        min_workers,
        f"an int from 1 to num_workers={num_workers}",
    )
    require(
        num_workers > 1 or not spare_workers,
        "spare_workers",
        spare_workers,
        "0 with one worker: a spare takes over the state of those that are left",
        fix="num_workers=2 or more; or checkpoint_dir=..., which survives the only one",
    )


def check_resources(custom_resources: Any) -> None:
    """Refuse a `resources_per_worker` that is no dict of amounts."""
    if custom_resources is None:
        return
    if not isinstance(custom_resources, Mapping):
        raise WrongTypeError(
            "resources_per_worker is not a dict",
            expected="a dict from names of Ray resources to amounts",
            got=f"{type(custom_resources).__name__}: {custom_resources!r:.60}",
        )
    check_numbers(**{f"resources_per_worker[{name!r}]": n for name, n in custom_resources.items()})


def check_functions(hook: Any, callbacks: Any) -> tuple[Callback, ...]:
    """The callbacks, if each is one, and if `hook` can be called."""
    if hook is not None and not callable(hook):
        raise WrongTypeError(
            "initialization_hook cannot be called",
            expected="a function without arguments, called on every worker",
            got=f"{hook!r:.80}",
        )
    if not isinstance(callbacks, Sequence):
        raise WrongTypeError(
            "callbacks is not a list",
            expected="a list or tuple of lockstep.Callback objects",
            got=f"{callbacks!r:.80}",
            fix="callbacks=[MyCallback()]",
        )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise WrongTypeError(
                "callbacks=[...] holds something that is no callback",
                expected="instances of subclasses of lockstep.Callback",
                got=f"{callback!r:.80}",
                fix="callbacks=[MyCallback()]" if inspect.isclass(callback) else None,
            )
        refuse_unused_methods(type(callback))
    return tuple(callbacks)


def pick_gpu(use_gpu: Any, backend: str = "auto") -> bool:
    """Whether workers use a GPU each, as far as this process can tell.

    With "auto" other machines may have GPUs, and `backend` may still be what they need.
    """
    require_choice("use_gpu", use_gpu, (True, False, "auto"))
    pick_backend(backend, bool(use_gpu))
    return torch.cuda.is_available() if use_gpu == "auto" else bool(use_gpu)


def pick_backend(backend: str, gpu: bool) -> str:
    require_choice("backend", backend, ("auto", "nccl", "gloo"))
    require(
        gpu or backend != "nccl",
        "backend",
        backend,
        '"gloo" or "auto" for workers without GPUs',
    )
    return ("nccl" if gpu else "gloo") if backend == "auto" else backend


def pick_precision(precision: str, use_fp16: bool) -> PrecisionName:
    require_choice("precision", precision, get_args(PrecisionName))
    require(not use_fp16 or precision in ("fp32", "fp16"), "use_fp16", use_fp16, "one precision")
    return cast("PrecisionName", "fp16" if use_fp16 else precision)


def processes_and_replicas(sync: str, num_workers: int) -> tuple[int, int]:
    """Worker processes, and device replicas in each: one of the two is `num_workers`.

    Raises:
        ConfigurationError: there is no such `sync`.
    """
    require_choice("sync", sync, ("replicate", "ddp", "fsdp", "parameter_server", "data_parallel"))
    return (1, num_workers) if sync == "data_parallel" else (num_workers, 1)


def check_options(
    options: Options, operator_cls: type[TrainingOperator], num_processes: int, *, use_local: bool
) -> Options:
    """`options`, if they can be right, alone and with the loop that the operator brings."""
    step_freqs = (*sorted(VALID_SCHEDULER_STEP), None)
    require_choice("scheduler_step_freq", options.scheduler_step_freq, step_freqs)
    require_count("accumulate", options.accumulate)
    check_numbers(bucket_cap_mb=options.bucket_cap_mb)
    clip = options.clip_grad_norm
    is_norm = clip is None or _is_above_zero(clip)
    require(is_norm, "clip_grad_norm", clip, "a positive norm, or None")
    operator_cls._lockstep_check(options)
    _refuse_with_own_loop(options, operator_cls)
    _check_sync(options, use_local)
    _check_shadow(options, num_processes, use_local=use_local)
    if options.reproducible and operator_cls.joint_loss:
        raise ConfigurationError(
            "reproducible=True cannot hold for a joint loss",
            got=f"{operator_cls.__name__}.joint_loss = True",
            cause="its shards go through as one batch, whose size depends on num_workers",
            fix="leave reproducible out; the result is still that of one process, to rounding",
        )
    return options


def _check_sync(options: Options, use_local: bool) -> None:
    """Refuse options that only ``sync="replicate"`` has, or that ``sync="fsdp"`` lacks."""
    if options.sync == "replicate":
        return
    fix = f"leave sync={options.sync!r} out"
    require(
        not options.reproducible,
        "reproducible",
        options.reproducible,
        f"False with sync={options.sync!r}: it is only replicate that adds shards in their order",
        fix="leave out sync, or reproducible",
    )
    require(options.wrap_ddp, "wrap_ddp", False, f"True: {options.sync} synchronises", fix)
    require(
        options.sync != "fsdp" or not use_local,
        "use_local",
        use_local,
        'False with sync="fsdp": states of optimizers in this process would be left in shards',
    )


def _refuse_with_own_loop(options: Options, operator_cls: type[TrainingOperator]) -> None:
    """Refuse options of the default loop where the operator plainly has a loop of its own.

    A loop that may call the default loop's methods is looked at when an optimizer steps: see
    `lockstep.operator.custom_loop_refusals`. Shards come one by one only to a loop without any
    override.
    """
    for method in _DEFAULT_LOOP:
        if not operator_cls._lockstep_overrides(method):
            continue
        is_apart = not _may_call_default(getattr(operator_cls, method.__name__))
        refused = ["reproducible"] if options.reproducible else []
        for name in [*refused, *(requested_loop_options(options) if is_apart else [])]:
            raise ConfigurationError(
                f"{name} belongs to the default loop; {operator_cls.__name__} has its own "
                f"{method.__name__}",
                fix=CUSTOM_LOOP_FIXES[name],
            )


def _may_call_default(method: Any) -> bool:
    """Whether a method of the user's names a method of the default loop anywhere in its code."""
    codes = [getattr(inspect.unwrap(method), "__code__", None)]
    while codes:
        code = codes.pop()
        if code is None or {each.__name__ for each in _DEFAULT_LOOP} & set(code.co_names):
            return True
        codes += [each for each in code.co_consts if inspect.iscode(each)]
    return False


def _check_shadow(options: Options, num_processes: int, *, use_local: bool) -> None:
    """Refuse a `shadow_every` or `shadow_limit` that cannot be right, or has nothing to compare."""
    require_count("shadow_every", options.shadow_every, least=0)
    require_count("shadow_limit", options.shadow_limit)
    if not options.shadow_every:
        return
    named, every = "shadow_every", options.shadow_every
    require(
        options.reproducible,
        named,
        every,
        "0 without reproducible=True: only there have two workers the same bits of a shard",
        fix="reproducible=True",
    )
    require(
        not use_local,
        named,
        every,
        "0 with use_local=True: rank 0 in this process cannot be replaced",
        fix="leave use_local out",
    )
    for name in ("wrap_ddp", "add_dist_sampler"):
        require(getattr(options, name), named, every, f"0 with {name}=False", f"{name}=True")
    require(
        num_processes > 1,
        named,
        every,
        "0 with one worker: another one has to compute the same",
        fix="num_workers=3: two see that bits differ, a third one which are right",
    )


def check_memory_checkpoints(every: Any) -> int | str | None:
    """See `TorchTrainer`.

    Raises:
        ConfigurationError: neither a number above zero, nor "auto", nor None.
    """
    if every is None or every == "auto":
        return None if every is None else "auto"
    require_count("memory_checkpoint_every", every, least=1)
    return int(every)
