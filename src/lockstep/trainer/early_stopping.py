# SPDX-License-Identifier: Apache-2.0
"""Callbacks that monitor one metric: `EarlyStopping` ends training, `KeepBest` saves the best."""

from __future__ import annotations

import difflib
import logging
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.rotation import set_aside
from lockstep.errors import ConfigurationError
from lockstep.metrics.metric_values import as_number
from lockstep.trainer.argument_checks import require, require_choice, require_count
from lockstep.trainer.best_note import BestNote
from lockstep.trainer.callbacks import Callback

if TYPE_CHECKING:
    import os

    from lockstep.trainer.torch_trainer import TorchTrainer

_log = logging.getLogger("lockstep")


class MetricMonitor(Callback):
    """Looks for one metric in every result and compares it with the best so far.

    Where `train` and `validate` both report it, the values of `validate` alone count: from its
    first one on, what `train` had reported is forgotten.

    Args:
        metric: a key of what `train` or `validate` returns.
        mode: "min" if less is better, "max" if more is.
        min_delta: what is better by no more than this is not better.
    """

    def __init__(self, metric: str, *, mode: str, min_delta: float = 0.0) -> None:
        require_choice("mode", mode, ("min", "max"))
        require(min_delta >= 0, "min_delta", min_delta, "0 or more")
        self.metric, self.mode, self.min_delta = metric, mode, min_delta
        self._begin()

    def _begin(self) -> None:
        """Forget what was seen of another trainer."""
        self._forget_values()
        # The method whose values count.
        self._method: str | None = None
        # The keys of the results so far, by the method that gave them.
        self._keys: dict[str, set[str]] = {}

    def _forget_values(self) -> None:
        """Begin anew with the best and what follows from it."""
        self.best: float | None = None

    def _look_back(self, trainer: TorchTrainer) -> None:
        """Before the first value, recall what an earlier program has seen of this run."""

    def on_start(self, trainer: TorchTrainer) -> None:
        self._begin()

    def judge(self, trainer: TorchTrainer, value: float) -> None:
        """Handle a new value of the metric."""
        raise NotImplementedError

    def on_train_end(self, trainer: TorchTrainer, result: dict[str, Any]) -> None:
        self._look("train", trainer, result)

    def on_validate_end(self, trainer: TorchTrainer, result: dict[str, Any]) -> None:
        self._look("validate", trainer, result)

    def on_shutdown(self, trainer: TorchTrainer) -> None:
        if self._method is None:
            warnings.warn(
                f"{type(self).__name__} has watched for {self.metric!r} and never saw it",
                stacklevel=2,
            )

    def _look(self, method: str, trainer: TorchTrainer, result: dict[str, Any]) -> None:
        self._keys[method] = set(result)
        value = as_number(result.get(self.metric))
        if value is not None:
            if self._method is None:
                self._method = method
                self._look_back(trainer)
            if self._method == "train" and method == "validate":
                self._method = method
                self._forget_values()
            if self._method == method:
                self.judge(trainer, float(value))
        elif self._method is None and len(self._keys) == 2:
            raise self._not_found_error()

    def _not_found_error(self) -> ConfigurationError:
        found = sorted(set.union(*self._keys.values()))
        alike = difflib.get_close_matches(self.metric, found, n=1)
        return ConfigurationError(
            f"{type(self).__name__} watches a metric that is in no result",
            expected=f"one of {', '.join(found)}",
            got=repr(self.metric),
            fix=f"did you mean {alike[0]!r}?" if alike else None,
        )

    def is_better(self, value: float) -> bool:
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta


class EarlyStopping(MetricMonitor):
    """Sets `stop_reason` when the metric has not got better for a while, or is NaN.

    ::

        with TorchTrainer(..., callbacks=[EarlyStopping("val_loss", mode="min")]) as trainer:
            while not trainer.should_stop:
                trainer.train(), trainer.validate()

    Args:
        metric, mode, min_delta: see `MetricMonitor`.
        patience: how many values in a row may be no better than the best.
    """

    def __init__(
        self, metric: str, *, mode: str, patience: int = 3, min_delta: float = 0.0
    ) -> None:
        super().__init__(metric, mode=mode, min_delta=min_delta)
        require_count("patience", patience)
        self.patience = patience

    def _forget_values(self) -> None:
        super()._forget_values()
        self.num_worse, self.stop_reason = 0, None

    def judge(self, trainer: TorchTrainer, value: float) -> None:
        if math.isnan(value):
            self.stop_reason = f"{self.metric} is NaN"
        elif self.is_better(value):
            self.best, self.num_worse = value, 0
        else:
            self.num_worse += 1
            if self.num_worse >= self.patience:
                self.stop_reason = (
                    f"{self.metric} was {self.best:g} at its best, and no better in the"
                    f" {self.num_worse} results since"
                )


class KeepBest(MetricMonitor):
    """Saves the run whenever the metric is better than ever; `trainer.load(path)` takes it.

    The note ``<path>.json`` says what the file was saved for. A run that resumes from its
    `checkpoint_dir`, or loads a state of the note's step or a later one, keeps the file until it is
    beaten. A run that loads a state of an earlier step goes on without the file, which may be of
    another run, and renames it to ``set-aside-...``. A run that begins anew replaces it.

    Args:
        path: where `trainer.save` writes to.
        metric, mode, min_delta: see `MetricMonitor`.

    Attributes:
        best: the metric of what was saved; None before.
    """

    def __init__(
        self, path: str | os.PathLike[str], metric: str, *, mode: str, min_delta: float = 0.0
    ) -> None:
        super().__init__(metric, mode=mode, min_delta=min_delta)
        self.path = Path(path)
        self._note_path = Path(f"{self.path}.json")

    def judge(self, trainer: TorchTrainer, value: float) -> None:
        if self.is_better(value):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            step = trainer.status()["step"]
            # The note comes after the file: a kill in between leaves an earlier note, whose value
            # is worse than the file's, and the run that goes on saves what is better than the note.
            # A note that comes first would be better than the file, and the run would never save
            # the state that the note promises.
            trainer.save(self.path)
            self.best = value
            BestNote(self.metric, self.mode, value, step, self._method).write(self._note_path)

    def _look_back(self, trainer: TorchTrainer) -> None:
        """Read the best value of an earlier program, if this run goes on from a state of one."""
        if trainer._steps.loaded == 0 or not self.path.exists():
            return
        note = BestNote.read(self._note_path)
        if note is None or (note.metric, note.mode) != (self.metric, self.mode):
            return
        if _may_be_of_this_run(note, trainer):
            # An earlier version has not said of which method its value was.
            self.best, self._method = note.value, note.of or self._method
        else:
            aside = set_aside(str(self.path))
            set_aside(str(self._note_path))
            _log.warning(
                "%s (%s=%g at step %d) is not of this run, which goes on from step %d without it:"
                " %s",
                self.path,
                note.metric,
                note.value,
                note.step,
                trainer._steps.loaded,
                aside,
            )


def _may_be_of_this_run(note: BestNote, trainer: TorchTrainer) -> bool:
    """Whether a run that has loaded a state may have saved what the note is of.

    The criterion is that of a run's checkpoints (see `lockstep.checkpoint.rotation`): the steps of
    a run only grow, so a file of a later step than the state that was loaded is of another run, or
    of a continuation that was abandoned. A program that was killed may have saved its best behind
    its last checkpoint; the run that resumes from the same directory computes those steps again.
    """
    return trainer._disk.resumes_own or note.step <= trainer._steps.loaded
