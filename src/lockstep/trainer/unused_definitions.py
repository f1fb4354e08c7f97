# SPDX-License-Identifier: Apache-2.0
"""Refuses methods of an operator or callback that would never be called, before anything starts."""

from __future__ import annotations

import difflib
import inspect
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import ConfigurationError
from lockstep.operator import TrainingOperator
from lockstep.trainer.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_SIMILARITY: Final = 0.86
"""Least similarity of a misspelt name: of `validation_batch`, not of `train_one_batch`,
`log_loss`."""

_METHODS: Final = (
    "setup",
    "compute_loss",
    "train_epoch",
    "train_batch",
    "validate",
    "validate_batch",
    "predict_batch",
    "state_dict",
    "load_state_dict",
)
_SETTINGS: Final = ("joint_loss", "loss_reduction")
"""Methods and plain attributes that an operator may define."""

_NAMES_IN_OTHER_TRAINERS: Final = {
    "training_step": "compute_loss, or train_batch for a step of your own",
    "train_step": "compute_loss, or train_batch for a step of your own",
    "validation_step": "validate_batch",
    "val_step": "validate_batch",
    "val_batch": "validate_batch",
    "eval_batch": "validate_batch",
    "predict_step": "predict_batch",
    "configure_optimizers": "setup, which calls self.register(...)",
    "train_dataloader": "setup, which calls self.register_data(...)",
    "val_dataloader": "setup, which calls self.register_data(...)",
    "on_epoch_end": "train_epoch; or write a lockstep.Callback",
    "on_train_epoch_end": "train_epoch; or write a lockstep.Callback",
}
"""Names of other trainers for the methods of an operator."""

_ARGUMENTS: Final = ("use_gpu", "use_fp16", "use_tqdm", "scheduler_step_freq", "config")
"""Properties that are the trainer's arguments."""

_NOT_FOR_THE_LOOP: Final[Mapping[Callable[..., Any], str]] = {
    TrainingOperator.backward: "override train_batch, and call it there; or leave it out",
    TrainingOperator.no_sync: "override train_batch, and enter it there; or leave it out",
}
"""Methods that only a step of the user's own calls: the default loop does their work otherwise."""

_CALLBACK_METHODS: Final = tuple(name for name in vars(Callback) if name.startswith("on_"))


def refuse_unused_methods(cls: type[Any]) -> None:
    """Raise if an operator or callback class defines a method that would never be called.

    Raises:
        ConfigurationError: names the method, and the one that was meant.
    """
    if issubclass(cls, TrainingOperator):
        _refuse_shadowing(cls)
    _refuse_near_names(cls)


def _refuse_shadowing(cls: type[TrainingOperator]) -> None:
    """Refuse overrides of what a trainer's arguments decide, and of methods that users call."""
    for each in vars(TrainingOperator).values():
        getter = each.fget if isinstance(each, property) else None
        if getter is None or not cls._lockstep_overrides(getter):
            continue
        name = getter.__name__
        raise ConfigurationError(
            f"{cls.__name__}.{name} cannot be set by the class: the trainer says it",
            fix=f"TorchTrainer(..., {name}=...)"
            if name in _ARGUMENTS
            else f"read self.{name}, and call yours by another name",
        )
    for method, instead in _NOT_FOR_THE_LOOP.items():
        if cls._lockstep_overrides(method) and not cls._lockstep_overrides_loop():
            raise ConfigurationError(
                f"{cls.__name__}.{method.__name__} would never be called: the default loop does"
                " not call it",
                fix=instead,
            )
    if cls._lockstep_overrides(TrainingOperator.load_state_dict) and not cls._lockstep_overrides(
        TrainingOperator.state_dict
    ):
        raise ConfigurationError(
            f"{cls.__name__}.load_state_dict would never be called: nothing is saved for it",
            fix="def state_dict(self): return ..., or leave both out",
        )


def _refuse_near_names(cls: type[Any]) -> None:
    """Refuse a method that is unused only because its name is misspelt.

    A method whose name occurs in the code of the class, or in its file, is a helper of the user's.
    """
    base: type[Any] = Callback if issubclass(cls, Callback) else TrainingOperator
    for owner in cls.__mro__:
        # What a mixin of another package defines is for that package.
        if not issubclass(owner, base) or owner is base or owner.__module__.startswith("lockstep."):
            continue
        for name, value in vars(owner).items():
            is_known = hasattr(base, name) or name.startswith("_")
            meant = None if is_known else _find_intended_name(name, value, base)
            if meant is None or _is_used(name, cls, base, owner):
                continue
            raise ConfigurationError(
                f"{cls.__name__}.{name} would never be used",
                where=f"{owner.__module__}.{owner.__qualname__}",
                expected=", ".join(
                    _CALLBACK_METHODS if base is Callback else (*_METHODS, *_SETTINGS)
                ),
                fix=f"call it {meant}; or rename it, if it is for code of your own",
            )


def _find_intended_name(name: str, value: Any, base: type[Any]) -> str | None:
    is_method = isinstance(value, FunctionType)
    if base is Callback:
        # The prefix alone makes it a hook: the most similar name is the advice.
        is_hook = is_method and name.startswith("on_")
        return (
            difflib.get_close_matches(name, _CALLBACK_METHODS, n=1, cutoff=0)[0]
            if is_hook
            else None
        )
    if is_method and name in _NAMES_IN_OTHER_TRAINERS:
        return _NAMES_IN_OTHER_TRAINERS[name]
    near = difflib.get_close_matches(
        name, _METHODS if is_method else _SETTINGS, n=1, cutoff=_SIMILARITY
    )
    return near[0] if near else None


def _is_used(name: str, cls: type[Any], base: type[Any], owner: type[Any]) -> bool:
    others = [each for each in cls.__mro__ if not issubclass(each, base)]
    if any(hasattr(each, name) for each in others):
        return True  # a hook of another base class, which calls it
    functions = [
        value
        for each in cls.__mro__
        if issubclass(each, base) and not each.__module__.startswith("lockstep.")
        for value in vars(each).values()
        if isinstance(value, FunctionType)
    ]
    if any(name in used for function in functions for used in _names_in(function.__code__)):
        return True
    try:
        # The program may call the method: `apply_all_operators(lambda op: op.name())`.
        text = inspect.getsource(inspect.getmodule(owner) or owner)
    except (OSError, TypeError):
        return False
    return f".{name}" in text


def _names_in(code: CodeType) -> Iterator[tuple[str, ...]]:
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
