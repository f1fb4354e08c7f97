# SPDX-License-Identifier: Apache-2.0
"""`EvaluationWrites`: what forwards write while a run is validated, or predicts, is taken back.

Some models write in each forward, also in evaluation mode: a mean that follows the inputs, a
momentum encoder. In training each step commits one value for all ranks. An evaluation commits
nothing: each rank would keep what its own samples have made of the model, and the next gradient
would be that of several models. To commit there as well would cost an exchange in each batch,
where no rank waits for another. So every shard is evaluated with the buffers and weights with
which the evaluation began, on whichever rank, and the run goes on with them.

Buffers are copied when an evaluation begins. Weights are too large for that. Training knows to
which its forwards write: behind its first batch those alone are copied, and those of which an
earlier evaluation has shown it. Before it all weights are, in the memory that gradients and the
states of optimizers will take, until a few batches have shown to which a forward writes; and so
are they behind it where `InPlaceWriteTracker` does not look. What `ValidationStart` holds is not
copied again.

Torch's version counters tell what has been written, also to a weight without a copy, which is
refused. There are writes that no counter knows: the values tell of them in the first batches, and
in all batches for the weights that training writes. Tensors that are a rank's own
(`lockstep.local`) stay as they are.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import torch

from lockstep._torch_compat import buffers_of, version_of
from lockstep.errors import NotAvailableError
from lockstep.operator.group_settings_copy import GroupSettingsCopy
from lockstep.operator.in_place_writes import copy_of_weight, has_value, version, write_back
from lockstep.sync import buffer_places, is_local
from lockstep.sync.local_parameters import is_local_buffer
from lockstep.sync.tensor_bits import same_bits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.operator.in_place_writes import InPlaceWriteTracker
    from lockstep.operator.training_parts import TrainingParts
    from lockstep.sync.buffer_broadcast import BufferPlace

_log = logging.getLogger("lockstep")

_BATCHES: Final = 3
"""In which all copies are compared; as many as the steps of `InPlaceWriteTracker`."""


class EvaluationWrites:
    """Takes back what the forwards of an operator's evaluations write.

    Args:
        in_training: the weights to which forwards write in training.

    Attributes:
        copied_elsewhere: by weight, a copy that others hold for as long as they need it.
    """

    def __init__(self, in_training: InPlaceWriteTracker) -> None:
        self._in_training = in_training
        self.copied_elsewhere: WeakValueDictionary[torch.Tensor, torch.Tensor]
        self.copied_elsewhere = WeakValueDictionary()
        self._written: dict[torch.Tensor, None] = {}
        # Of the weights and buffers: those that a forward has written to without a trace.
        self._silent: set[object] = set()
        self._batches_left = _BATCHES
        self._held: list[_HeldWeight | _HeldBuffer] | None = None
        # A loss may change settings of the optimizers, too.
        self._settings: GroupSettingsCopy | None = None
        self._where = ""
        self._has_warned = False

    @contextmanager
    def taken_back(self, run: TrainingParts, where: str) -> Iterator[None]:
        """Enter around an evaluation: at its end, however it ends, the models are as before.

        Args:
            run: the models that are evaluated.
            where: the rank and the step, for an error.

        Raises:
            NotAvailableError: see `take_back`.
        """
        outer = self._held, self._settings, self._where
        self._where = where
        self._held = [*self._weights_of(run), *_buffers_of(run)]
        self._settings = GroupSettingsCopy(run.optimizers)
        try:
            yield
        except BaseException:
            self._take_back()
            raise
        else:
            self.take_back()
        finally:
            self._held, self._settings, self._where = outer

    def end_batch(self) -> None:
        """Take back what the evaluation of a batch has written.

        Raises:
            NotAvailableError: see `take_back`.
        """
        self.take_back()
        if self._held is None or not self._batches_left:
            return
        self._batches_left -= 1
        if not self._batches_left:
            self._drop_copies()

    def take_back(self) -> None:
        """Within an evaluation, before a shard: take back what the shards before have written.

        Raises:
            NotAvailableError: nobody has the value that a weight had before.
        """
        lost = self._take_back()
        if not lost:
            return
        raise NotAvailableError(
            "a forward writes to a weight for the first time after the first batches",
            where=self._where,
            got=f"{len(lost)} weights in evaluation mode",
            cause="a validation or a prediction is to leave the run as it was, and nobody has"
            " copied what the weight was before",
            fix="do not write in evaluation mode (self.training); or write in every forward from"
            " the first on; or keep it in a buffer",
        )

    def _take_back(self) -> list[torch.Tensor]:
        """The weights that were written to and of which there is no copy."""
        lost: list[torch.Tensor] = []
        if self._held is None:
            return lost
        if self._settings is not None:
            self._settings.restore()
        with torch.no_grad():
            for each in self._held:
                if self._may_be_silent(each) and each.has_other_value():
                    self._silent.add(each.key)
                if not (each.is_written() or each.key in self._silent):
                    continue
                if isinstance(each, _HeldWeight):
                    self._written[each.weight] = None
                    lost += [] if each.has_copy else [each.weight]
                self._warn(each)
                each.put_back()
        return lost

    def _may_be_silent(self, held: _HeldWeight | _HeldBuffer) -> bool:
        """Whether the value is to tell if it has been written to."""
        if held.key in self._silent:
            return False
        # An encoder that begins as a copy does not move before its model has trained.
        is_known = isinstance(held, _HeldWeight) and held.trained in self._in_training
        return self._batches_left > 0 or is_known

    def _warn(self, held: _HeldWeight | _HeldBuffer) -> None:
        """Say once that something is taken back: sums over a validation would stay at zero."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: an evaluation has written to %s, which is put back after each batch, so that"
                " all workers evaluate one model, and train it on. What is to stay, each worker's"
                " own, is lockstep.local(...), or no buffer",
                *(self._where, held.description),
            )

    def _drop_copies(self) -> None:
        """Drop the copies of the weights to which no forward writes."""
        for each in self._held or ():
            if isinstance(each, _HeldWeight) and not self._is_expected(each.weight, each.trained):
                each.drop_copy()

    def _is_expected(self, weight: torch.Tensor, trained: torch.Tensor) -> bool:
        knows_none = self._batches_left > 0 and not self._in_training.has_looked
        return knows_none or weight in self._written or trained in self._in_training

    def _weights_of(self, run: TrainingParts) -> list[_HeldWeight]:
        if run.sync is not None and run.sync.units:
            return []  # a forward that writes to a unit is refused
        # What a model's forward writes, its average's does.
        trained = {each: each for each in run.parameters()}
        for average, model in zip(run.averages, run.plain_models(), strict=False):
            trained.update(zip(average.parameters(), model.parameters(), strict=True))
        return [self._hold(*each) for each in trained.items() if not is_local(each[0])]

    def _hold(self, weight: torch.Tensor, trained: torch.Tensor) -> _HeldWeight:
        if not self._is_expected(weight, trained):
            return _HeldWeight(weight, trained, None)
        value = self.copied_elsewhere.get(weight)
        # The user's own validation may have swapped another value in since.
        is_valid = value is not None and has_value(weight, value)
        return _HeldWeight(weight, trained, value if is_valid else copy_of_weight(weight))


def _buffers_of(run: TrainingParts) -> list[_HeldBuffer]:
    places = buffer_places((*run.modules(), *run.averages))
    return [_HeldBuffer(each) for each in places if not is_local_buffer(each.owner, each.key)]


class _HeldWeight:
    """A weight as it was when the evaluation began.

    Args:
        weight: the weight.
        trained: of an average's weight, the model's; else `weight`.
        value: a copy of the weight.
    """

    def __init__(
        self, weight: torch.Tensor, trained: torch.Tensor, value: torch.Tensor | None
    ) -> None:
        self.weight, self.trained = weight, trained
        self._version = version(weight)
        self._value = value

    @property
    def key(self) -> object:
        return self.weight

    @property
    def description(self) -> str:
        return f"a weight of shape {tuple(self.weight.shape)}"

    @property
    def has_copy(self) -> bool:
        return self._value is not None

    def drop_copy(self) -> None:
        self._value = None

    def is_written(self) -> bool:
        return version(self.weight) != self._version

    def has_other_value(self) -> bool:
        return self._value is not None and not has_value(self.weight, self._value)

    def put_back(self) -> None:
        if self._value is not None:
            write_back({self.weight: self._value})
        self._version = version(self.weight)


class _HeldBuffer:
    """A buffer as it was when the evaluation began: the tensor itself, and its value."""

    def __init__(self, place: BufferPlace) -> None:
        self._place = place
        self._tensor = place.tensor()
        self._value = None if self._tensor is None else self._tensor.detach().clone()
        self._version = _version_of_buffer(self._tensor)

    @property
    def key(self) -> object:
        return self._place.owner, self._place.key

    @property
    def description(self) -> str:
        return f"the buffer `{self._place.key}` of a {type(self._place.owner).__name__}"

    def is_written(self) -> bool:
        tensor = self._place.tensor()
        return tensor is not self._tensor or _version_of_buffer(tensor) != self._version

    def has_other_value(self) -> bool:
        tensor = self._place.tensor()
        if tensor is None or self._value is None:
            return tensor is not self._value
        return not same_bits(tensor, self._value)

    def put_back(self) -> None:
        # The tensor, too: a compiled step, and the undo of a step, know the object.
        buffers_of(self._place.owner)[self._place.key] = self._tensor
        self._place.put(self._value)
        self._tensor = self._place.tensor()
        self._version = _version_of_buffer(self._tensor)


def _version_of_buffer(tensor: torch.Tensor | None) -> int:
    # A tensor that was made in inference mode counts nothing, and cannot be written to outside.
    return 0 if tensor is None or tensor.is_inference() else version_of(tensor)
