# SPDX-License-Identifier: Apache-2.0
"""The state of a run: out of the workers, into them, and to files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep import checkpoint
from lockstep.errors import CheckpointError, ConfigurationError
from lockstep.trainer.arguments import require
from lockstep.trainer.calls import Calls
from lockstep.trainer.dataset_training import DatasetTraining

if TYPE_CHECKING:
    from torch import nn

    from lockstep.operator import TrainingOperator


class KeepsState(Calls):
    """The part of a trainer that gives out its state and takes one over."""

    _operator_cls: type[TrainingOperator]
    _explicit: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self._feeding = DatasetTraining()

    def get_model(self) -> nn.Module | list[nn.Module]:
        """A copy of the trained model on the CPU: a plain module, loadable without lockstep.

        A list if `register` was given a list or tuple of models.
        """
        model: nn.Module | list[nn.Module] = self._call_rank(0, "models")
        return model

    def get_averaged_model(self) -> nn.Module | list[nn.Module]:
        """As `get_model`, with the averages that ``register(ema=...)`` keeps of the weights.

        Raises:
            ConfigurationError: the operator registered without `ema`.
        """
        model: nn.Module | list[nn.Module] = self._call_rank(0, "averaged_models")
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
        return self._state("state_dict")

    def _state(self, method: str) -> dict[str, Any]:
        state: dict[str, Any] = self._from_rank_0(method)
        if self._spec.num_workers > 1 and self._operator_cls._overrides("state_dict"):
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
        self._refuse_another_run(state)
        self._feeding.change_to(None, self._spec, self._call)
        self._call("check_state", state)
        try:
            self._call("apply_state", state)
        except BaseException:
            if self._engine.ended is None:
                self._call("settle_state", False)
            raise
        self._call("settle_state", True)
        num_shards = int(state.get("num_shards", self._spec.num_shards))
        self._spec = replace(self._spec, num_shards=num_shards)
        self._engine.cut_anew(num_shards)
        self._steps.go_to(int(state.get("global_step", 0)))
        self._give_back()

    def _refuse_another_run(self, state: Mapping[str, Any]) -> None:
        for name, explicit in self._explicit.items():
            if explicit is not None and state.get(name, explicit) != explicit:
                raise CheckpointError(
                    f"the state was made with another {name}",
                    expected=f"{name}={explicit}, as the trainer was told",
                    got=f"{name}={state[name]}",
                    fix=f"leave {name} out: it is taken from the state",
                )

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write `state_dict()` on this machine, into one file (a directory under ``fsdp``)."""
        in_shards = self._spec.options.sync == "fsdp"
        write = checkpoint.write_directory if in_shards else checkpoint.write
        self._check_open()
        is_here = self._engine.local_operator() is not None  # else it is a copy in any case
        return write(os.fspath(path), self._state("state_to_write" if is_here else "state_dict"))

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
