# SPDX-License-Identifier: Apache-2.0
"""Fault injection: makes a worker fail at a chosen step and phase, to test that a run recovers.

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

from torch.utils.data import IterableDataset

from lockstep.errors import ConfigurationError
from lockstep.sync.optimizer_inspection import inner_optimizers
from lockstep.tensor_copies import is_shard
from lockstep.tensor_tree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
    """A failure of one worker.

    Attributes:
        action: "kill" (SIGKILL), "stop" (SIGSTOP), "hang" (an endless loop), "delay", "raise" (a
            RuntimeError), "interrupt" (SIGINT: Ctrl-C).
        rank: the rank that fails.
        step: the global batch in which it fails, counted from 0 over the whole run.
        phase: the work during which it fails: "data" (a sample is read), "forward", "backward" (the
            first gradient is computed), "buckets" (the last gradient is computed; others have been
            sent), "optimizer" (before its step), "applied" (after its step), "validation" (a
            forward in evaluation mode), "save" (the model's state is read).
        seconds: the length of a delay.

    Raises:
        ConfigurationError: the action or the phase is unknown.
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
            signal.raise_signal(_SIGNALS[self.action])  # for this thread: the signal acts at once


def struck(operator_cls: type[TrainingOperator], *strikes: Strike) -> type[TrainingOperator]:
    """A subclass of `operator_cls` whose workers fail by `strikes`, each of them once.

    After a failure another worker computes the step again, and must not fail again. So a strike
    that has happened is recorded in a temporary directory, and all workers that may be struck have
    to run on one machine.
    """
    directory = tempfile.mkdtemp(prefix="lockstep-strikes-")
    # The directory outlives the class: a trainer sends the class to later workers as well.
    atexit.register(shutil.rmtree, directory, ignore_errors=True)

    class Struck(operator_cls):  # type: ignore[valid-type,misc]
        def setup(self, config: Any) -> None:
            cast("Any", super()).setup(config)
            _register_triggers(
                self,
                [
                    _OneTimeStrike(strike, Path(directory, str(i)))
                    for i, strike in enumerate(strikes)
                ],
            )

        def register_data(self, *, train_loader: Any = None, validation_loader: Any = None) -> None:
            self._read: Callable[..., None] = do_nothing
            strikes_reads = any(each.phase == "data" for each in strikes)
            if strikes_reads and hasattr(train_loader, "dataset"):
                # DataLoader forbids assigning its dataset; this is safe before the first read.
                watched = _watch_reads(train_loader.dataset, lambda: self._read())
                object.__setattr__(train_loader, "dataset", watched)
            super().register_data(train_loader=train_loader, validation_loader=validation_loader)

    Struck.__name__, Struck.__qualname__ = operator_cls.__name__, operator_cls.__qualname__
    return Struck


@dataclass
class _OneTimeStrike:
    """A strike, and the file whose existence says that the strike has happened."""

    strike: Strike
    done: Path

    def fire(self) -> None:
        try:
            os.close(os.open(self.done, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.strike.hit()


class _Trigger:
    """A hook that runs when `phase` is reached; a forward in evaluation mode is "validation".

    It pickles as `do_nothing`: a copy of the model in another process does not fail.
    """

    def __init__(self, operator: Any, armed: Sequence[_OneTimeStrike], phase: Phase) -> None:
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
        return partial, (do_nothing,)


def do_nothing(*_: Any) -> None:
    """Stands for a hook in a copy of the model in another process."""


def _register_triggers(operator: Any, armed: Sequence[_OneTimeStrike]) -> None:
    def trigger(phase: Phase) -> _Trigger:
        return _Trigger(operator, armed, phase)

    run = operator._lockstep.registered
    model = run.models[0]
    model.register_forward_pre_hook(trigger("forward"))
    model.register_state_dict_pre_hook(trigger("save"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if is_shard(trained[0]):
        # In graphs other tensors stand for shards, new ones in each step: the layers are watched.
        layers = [each for each in model.modules() if [*each.parameters(recurse=False)]]
        _call_after(layers[-1], trigger("backward"))
        _call_after(layers[0], trigger("buckets"))
    else:
        operator._reached = [
            call_in_backward(trained[-1], trigger("backward")),
            call_in_backward(trained[0], trigger("buckets")),
        ]
    first = run.optimizers[0]
    for optimizer in (first, *inner_optimizers(first)):
        optimizer.register_step_pre_hook(trigger("optimizer"))
        optimizer.register_step_post_hook(trigger("applied"))
    operator._read = trigger("data")


def call_in_backward(parameter: nn.Parameter, call: Callable[..., Any]) -> Any:
    """Run `call` when backward reaches `parameter`, for as long as the returned node lives.

    Rejected: a hook on the parameter, which runs only when its gradient has been reduced.
    """
    view = parameter.view_as(parameter).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    node.register_prehook(call)
    return node


def _call_after(layer: nn.Module, call: Callable[..., Any]) -> None:
    """Run `call` when backward reaches the output of `layer`."""

    def watch(module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(call)

    layer.register_forward_hook(watch)


def _watch_reads(dataset: Any, read: Callable[[], None]) -> Any:
    """`dataset` as a loader sees it, with a call of `read` whenever samples are read."""
    if isinstance(dataset, IterableDataset):
        return _watch_stream(dataset, read)
    return _TriggeringDataset(dataset, read)


def _watch_stream(stream: IterableDataset[Any], read: Callable[[], None]) -> Any:
    """A second object of a subclass, which shares all attributes with `stream`.

    Rejected: a stream around the user's, whose generators would not be found among its attributes.
    """
    kind: Any = type(stream)

    def iterate(self: Any) -> Iterator[Any]:
        for sample in kind.__iter__(self):
            read()
            yield sample

    watched: Any = object.__new__(type(kind.__name__, (kind,), {"__iter__": iterate}))
    watched.__dict__ = vars(stream)
    return watched


class _TriggeringDataset:
    """A dataset that calls `read` before each sample, or each batch that is read at once."""

    def __init__(self, dataset: Any, read: Callable[[], None]) -> None:
        self._dataset = dataset
        self._trigger = read

    def __getitem__(self, index: Any) -> Any:
        self._trigger()
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "_trigger"):
            raise AttributeError(name)  # unpickling asks before the attributes are set
        found = getattr(self._dataset, name)
        # No method of the class: loaders ask whether a dataset has it.
        return partial(self._read_at_once, found) if name == "__getitems__" and found else found

    def _read_at_once(self, read: Callable[[Any], Any], indices: Any) -> Any:
        self._trigger()
        return read(indices)
