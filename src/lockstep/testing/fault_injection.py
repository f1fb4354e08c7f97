# SPDX-License-Identifier: Apache-2.0
"""Fault injection: a worker fails at a chosen step and phase. Does your operator survive it?

::

    from lockstep.testing import Strike, struck

    Fragile = struck(Digits, Strike("kill", rank=1, step=20, phase="backward"))
    with TorchTrainer(training_operator_cls=Fragile, num_workers=2, spare_workers=1) as trainer:
        trainer.train()
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from lockstep.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from lockstep.operator import TrainingOperator

Action = Literal["kill", "stop", "hang", "delay", "raise", "interrupt"]
Phase = Literal[
    "data", "forward", "backward", "buckets", "optimizer", "applied", "validation", "save"
]

_ACTIONS: Final = get_args(Action)
_PHASES: Final = get_args(Phase)
_SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
}


@dataclass(frozen=True)
class Strike:
    """One failure.

    Attributes:
        action: "kill" (SIGKILL), "stop" (SIGSTOP), "hang" (an endless loop), "delay", "raise" (a
            RuntimeError), "interrupt" (SIGINT: Ctrl-C).
        rank: the rank that is hit.
        step: global batches of the run before the one that is hit.
        phase: the work that is hit: "data" (a sample is read), "forward", "backward" (the first
            gradient is computed), "buckets" (the last one is, others have been sent), "optimizer"
            (before its step), "applied" (after its step), "validation" (a forward of it), "save"
            (the model's state is read).
        seconds: of a delay.

    Raises:
        ConfigurationError: an unknown action or phase.
    """

    action: Action
    rank: int
    step: int
    phase: Phase
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS or self.phase not in _PHASES:
            raise ConfigurationError(
                "nobody knows how to strike like that",
                expected=f"one of {', '.join(_ACTIONS)} in one of {', '.join(_PHASES)}",
                got=f"{self.action!r} in {self.phase!r}",
            )

    def hit(self) -> None:
        """Let this process fail."""
        if self.action == "delay":
            time.sleep(self.seconds)
        elif self.action == "hang":
            while True:
                time.sleep(0.01)
        elif self.action == "raise":
            raise RuntimeError(f"struck in step {self.step}, {self.phase}")
        else:
            signal.raise_signal(_SIGNALS[self.action])  # to this thread: it has its effect at once


def struck(operator_cls: type[TrainingOperator], *strikes: Strike) -> type[TrainingOperator]:
    """The same operator, whose workers meet `strikes`: each strike once, in one process.

    Another worker computes the step again in which a strike hit, and must not be hit again: a
    strike that has happened is noted in a directory for temporary files, so that all workers that
    may be struck have to run on one machine.
    """
    directory = tempfile.mkdtemp(prefix="lockstep-strikes-")
    # The directory outlives the class: a trainer sends the class to later workers as well.
    atexit.register(shutil.rmtree, directory, ignore_errors=True)

    class Struck(operator_cls):  # type: ignore[valid-type,misc]
        def setup(self, config: Any) -> None:
            cast("Any", super()).setup(config)
            _arm(
                self, [_Armed(strike, Path(directory, str(i))) for i, strike in enumerate(strikes)]
            )

        def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None:
            self._read: Callable[..., None] = _do_nothing
            if hasattr(train_loader, "dataset"):
                # Past the loader's own refusal: nothing has been read yet.
                watched = _WatchedDataset(train_loader.dataset, lambda: self._read())
                object.__setattr__(train_loader, "dataset", watched)
            super().register_data(train_loader=train_loader, validation_loader=validation_loader)

    Struck.__name__, Struck.__qualname__ = operator_cls.__name__, operator_cls.__qualname__
    return Struck


@dataclass
class _Armed:
    """A strike, and the file that says that it has happened."""

    strike: Strike
    done: Path

    def fire(self) -> None:
        try:
            os.close(os.open(self.done, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.strike.hit()


class _Trigger:
    """A hook that runs where `phase` is reached; a forward in evaluation mode is "validation".

    A copy of the model, which may be sent to another process, gets `_do_nothing` instead.
    """

    def __init__(self, operator: Any, armed: Sequence[_Armed], phase: Phase) -> None:
        self._operator = operator
        self._armed = armed
        self._phase = phase

    def __call__(self, module: Any = None, *_: Any) -> None:
        is_validation = self._phase == "forward" and not module.training
        phase = "validation" if is_validation else self._phase
        here = (phase, self._operator._lockstep.committed, self._operator.world_rank)
        for each in self._armed:
            if (each.strike.phase, each.strike.step, each.strike.rank) == here:
                each.fire()

    def __reduce__(self) -> Any:
        return partial, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    return None


def _arm(operator: Any, armed: Sequence[_Armed]) -> None:
    def trigger(phase: Phase) -> _Trigger:
        return _Trigger(operator, armed, phase)

    run = operator._lockstep.registered
    model = run.models[0]
    model.register_forward_pre_hook(trigger("forward"))
    model.register_state_dict_pre_hook(trigger("save"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    operator._reached = [
        _in_backward(trained[-1], trigger("backward")),
        _in_backward(trained[0], trigger("buckets")),
    ]
    run.optimizers[0].register_step_pre_hook(trigger("optimizer"))
    run.optimizers[0].register_step_post_hook(trigger("applied"))
    operator._read = trigger("data")


def _in_backward(parameter: nn.Parameter, call: Callable[..., Any]) -> Any:
    """Call when backward reaches `parameter`, for as long as the returned node lives.

    A hook on the parameter itself would run only when its gradient has been reduced.
    """
    view = parameter.view_as(parameter).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    node.register_prehook(call)
    return node


class _WatchedDataset:
    """A dataset that calls `read` before each sample."""

    def __init__(self, dataset: Any, read: Callable[[], None]) -> None:
        self._dataset = dataset
        self._tell = read

    def __getitem__(self, index: Any) -> Any:
        self._tell()
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "_tell"):
            raise AttributeError(name)  # not unpickled yet
        return getattr(self._dataset, name)
