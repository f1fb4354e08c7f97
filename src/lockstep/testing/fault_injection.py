# SPDX-License-Identifier: Apache-2.0
"""Failures on purpose: does your operator survive them?

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
        rank: who is hit.
        step: after how many global batches of the run.
        phase: in the middle of what: "data" (a sample is read), "forward", "backward" (the first
            gradient comes), "buckets" (the last one comes, others have left), "optimizer"
            (before it steps), "applied" (after it has), "validation" (a forward of it), "save"
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
        """Do it, to this process."""
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
    """The same operator, whose workers meet `strikes`: each of them once, in one process.

    The step that was struck is computed again by somebody, who must not be struck again: what
    has happened is noted in a directory for temporary files, so all workers that may be struck
    have to run on one machine.
    """
    directory = tempfile.mkdtemp(prefix="lockstep-strikes-")
    # Not with the class: a trainer sends it to later workers, too, which look there.
    atexit.register(shutil.rmtree, directory, ignore_errors=True)

    class Struck(operator_cls):  # type: ignore[valid-type,misc]
        def setup(self, config: Any) -> None:
            cast("Any", super()).setup(config)
            _arm(
                self, [_Armed(strike, Path(directory, str(i))) for i, strike in enumerate(strikes)]
            )

        def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None:
            self._read: Callable[..., None] = _Nothing()
            if hasattr(train_loader, "dataset"):
                # Past the loader's own refusal: nothing has been read yet.
                watched = _Watched(train_loader.dataset, lambda: self._read())
                object.__setattr__(train_loader, "dataset", watched)
            super().register_data(train_loader=train_loader, validation_loader=validation_loader)

    Struck.__name__, Struck.__qualname__ = operator_cls.__name__, operator_cls.__qualname__
    return Struck


@dataclass
class _Armed:
    strike: Strike
    done: Path

    def fire(self) -> None:
        try:
            os.close(os.open(self.done, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.strike.hit()


class _Trigger:
    """Called where a phase is reached. In a copy of the model, which travels, it does nothing."""

    def __init__(self, operator: Any, armed: Sequence[_Armed], phase: str) -> None:
        self._operator = operator
        self._strikes = [each for each in armed if each.strike.phase == phase]

    def __call__(self, *_: Any) -> None:
        for each in self._strikes:
            at_step = each.strike.step == self._operator._lockstep.committed
            if at_step and each.strike.rank == self._operator.world_rank:
                each.fire()

    def __reduce__(self) -> Any:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *_: Any) -> None:
        return None


class _ByMode:
    """What reaches the model's forward: a step, or a validation."""

    def __init__(self, training: Any, validating: Any) -> None:
        self._triggers = {True: training, False: validating}

    def __call__(self, module: nn.Module, _: Any) -> None:
        self._triggers[module.training]()


def _arm(operator: Any, armed: Sequence[_Armed]) -> None:
    def reach(phase: str) -> Any:
        return _Trigger(operator, armed, phase)

    run = operator._lockstep.registered
    model = run.models[0]
    model.register_forward_pre_hook(_ByMode(reach("forward"), reach("validation")))
    _untyped(model).register_state_dict_pre_hook(reach("save"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    operator._reached = [_in_backward(trained[-1], reach("backward"))]
    operator._reached += [_in_backward(trained[0], reach("buckets"))]
    run.optimizers[0].register_step_pre_hook(reach("optimizer"))
    run.optimizers[0].register_step_post_hook(reach("applied"))
    operator._read = reach("data")


def _in_backward(parameter: nn.Parameter, call: Callable[..., Any]) -> Any:
    """Call when backward reaches `parameter`, for as long as what is returned lives.

    A hook on the parameter itself would be run when its gradient has been reduced.
    """
    view = parameter.view_as(parameter).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    node.register_prehook(call)
    return node


def _untyped(module: nn.Module) -> Any:
    """For what torch has no annotation for."""
    return module


class _Watched:
    """A dataset that tells when a sample is read."""

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
