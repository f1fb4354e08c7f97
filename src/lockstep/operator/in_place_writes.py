# SPDX-License-Identifier: Apache-2.0
"""`InPlaceWriteTracker`: copies of the weights that a forward writes to before an optimizer steps.

A momentum encoder follows the weights in the forward; prototypes are normalised there. The tracker
learns which weights these are in the first steps, in which it copies all weights; from then on it
copies only those. A loop that updates its weights by hand, and lets no optimizer step, stays in the
first steps.

Torch's version counters tell of a weight that is first written to after those steps, which costs
nothing. The weight is copied from then on; the step in which the write came first cannot be undone.
A write that raises no counter (`.data`, fused kernels, kernels of the user's own) is seen in the
first steps only, by the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from lockstep._torch_compat import version_of
from lockstep.sync.tensor_bits import same_bits
from lockstep.tensor_copies import TensorCopies, is_shard, overwrite

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn


_STEPS: Final = 3
"""More than one: a momentum encoder that begins as a copy does not move in the first step."""


class InPlaceWriteTracker:
    """Copies of the weights that a batch may write to, from before the batch.

    Attributes:
        is_ahead_of_step: no optimizer has stepped since the last `take`.
        has_looked: a batch has shown to which of all weights it writes.
    """

    def __init__(self) -> None:
        self._found: dict[torch.Tensor, None] = {}
        self._parameters: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._held: dict[torch.Tensor, None] = {}
        self._copies = TensorCopies()
        self.is_ahead_of_step = self.has_looked = False
        self._has_missed = False
        self._steps_left = _STEPS

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copy the weights that the next batch may write to.

        Args:
            parameters: all parameters of the run; of shards this rank's rows are copied.
        """
        self._parameters = list(parameters)
        self._versions = [version(parameter) for parameter in parameters]
        self._held = dict.fromkeys(parameters) if self._steps_left else dict(self._found)
        self._copies.take([_own_rows(parameter) for parameter in self._held])
        self.is_ahead_of_step, self._has_missed = True, False

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._found

    @property
    def found(self) -> list[torch.Tensor]:
        """The weights that batches write to, as far as is known."""
        return list(self._found)

    def expect(self, parameters: Iterable[torch.Tensor]) -> None:
        """Copy `parameters` from the next batch on."""
        self._found.update(dict.fromkeys(parameters))

    def has_missed(self) -> bool:
        """Whether a weight that was not copied was written to in this batch, before any step."""
        return (
            self._has_no_copy(self._find_changed()) if self.is_ahead_of_step else self._has_missed
        )

    def restore(self) -> None:
        """Undo the writes of the batches since `take`; does not undo the steps of optimizers."""
        write_back(self.values_before())

    def values_before(self) -> dict[torch.Tensor, torch.Tensor]:
        """By weight, the copy of the last `take`, where batches alone may have changed it."""
        pairs = zip(self._held, self._copies.values, strict=True)
        ahead = self.is_ahead_of_step
        return {held: value for held, value in pairs if ahead or held in self._found}

    def copy_found(self) -> dict[torch.Tensor, torch.Tensor]:
        """Copies of the weights that batches write to, as they are now."""
        return {each: copy_of_weight(each) for each in self._found}

    def put_into(
        self, modules: Iterable[nn.Module], states: Iterable[dict[str, Any] | None]
    ) -> None:
        """Put the values of the last `take` into the modules' `state_dict`s, on the CPU."""
        values = self.values_before()
        for module, state in zip(modules, states, strict=False):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                value = None if is_shard(parameter) else values.get(parameter)
                if state is not None and name in state and value is not None:
                    state[name] = value.to("cpu", copy=True)

    def _has_no_copy(self, changed: Iterable[torch.Tensor]) -> bool:
        return any(parameter not in self._held for parameter in changed)

    def _find_changed(self) -> list[torch.Tensor]:
        pairs = zip(self._parameters, self._versions, strict=True)
        return [parameter for parameter, before in pairs if version(parameter) != before]

    def find_writes(self) -> None:
        """Find the weights that the batch has changed so far."""
        if not self.is_ahead_of_step:
            return
        changed = self._find_changed()
        self._has_missed = self._has_no_copy(changed)
        self.expect(changed)
        if self._steps_left:
            self.has_looked |= bool(self._held)
            pairs = zip(self._held, self._copies.values, strict=True)
            self.expect(
                held for held, value in pairs if not torch.equal(_own_rows(held).detach(), value)
            )

    def note_step(self) -> None:
        """Note that an optimizer steps now: what it changes is no batch's write."""
        if self.is_ahead_of_step:
            self._steps_left = max(0, self._steps_left - 1)
        self.is_ahead_of_step = False


def write_back(values: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Give each weight the value of which `values` holds a copy."""
    overwrite([_own_rows(weight) for weight in values], list(values.values()))


def copy_of_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of the weight's value, for `write_back`; of a shard's this rank's rows."""
    return _own_rows(weight).detach().clone()


def has_value(weight: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a weight has the value that `value` is a copy of, to the bit."""
    return same_bits(_own_rows(weight).detach(), value)


def _own_rows(parameter: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter that this rank has."""
    if not is_shard(parameter):
        return parameter
    from lockstep._torch_compat.fully_shard import rows_of_shard

    return rows_of_shard(parameter)


def version(parameter: torch.Tensor) -> int:
    """A number that grows with each write: DTensor counts its own, and its rows those to them."""
    rows = _own_rows(parameter)
    return version_of(parameter) + (0 if rows is parameter else version_of(rows))
