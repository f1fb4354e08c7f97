# SPDX-License-Identifier: Apache-2.0
"""`BatchEndHook`: what `on_train_batch_end` writes to weights happens once in a batch.

A target network that follows the weights is written there. Lightning calls the hook once in each
process. Here a worker calls it once for each of its shards, and not at all for a batch of which it
has no samples. So each call starts from the weights and buffers that the first one found; and the
workers whose shards were empty get the weights of another one.

They get them at the end of the pass: a global batch with fewer samples than shards is an epoch's
last, and the pass may end with it although the epoch's end is not known yet (a stream, and a call
with ``num_steps``). Rejected: right after the batch. A worker that is lost while its peers, whose
optimizers have stepped, wait for it leaves a step that cannot be undone (see
`lockstep.worker.rollback`). If the group breaks in between, the others get the state of a worker
that has called the hook (see `lockstep.operator.writes_behind_steps`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from lockstep.errors import LostUpdateError
from lockstep.integrations.lightning.unsupported import overrides
from lockstep.operator.in_place_writes import InPlaceWriteTracker, has_value, write_back
from lockstep.operator.loop_protocols import rank_and_step
from lockstep.operator.registration import registered_parts
from lockstep.sync import buffer_places, copy_buffers, put_buffers
from lockstep.tensor_copies import is_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lockstep.integrations.lightning.logging_capture import LoggingCapture
    from lockstep.operator import TrainingOperator

Output = tuple[Any, Any, float]
"""What `training_step` returned for a shard, the shard's batch, and its samples."""


class BatchEndHook:
    """Calls a module's `on_train_batch_end`.

    Args:
        operator: whose step has ended.
        module: whose hook it is.
        logging: counts what the hook logs.
    """

    def __init__(self, operator: TrainingOperator, module: Any, logging: LoggingCapture) -> None:
        self._operator, self._module, self._logging = operator, module, logging
        self._may_write = overrides(module, "on_train_batch_end")
        self._writes = InPlaceWriteTracker()

    def call(self, outputs: Sequence[Output], index: int) -> None:
        """Call the hook for each of `outputs`, of batch `index` of the epoch.

        Raises:
            LostUpdateError: two calls have written different values to a weight.
        """
        has_several = len(outputs) > 1
        state = self._operator._lockstep
        is_missed = state.global_batch.has_empty_shards
        if self._may_write and is_missed and state.has_peers:
            step = state.committed + 1
            state.writes_behind_steps.note_unshared(step, has_written=bool(outputs))
        if not self._may_write or not outputs or not (has_several or is_missed):
            for each in outputs:
                self._call_once(each, index)
            return
        parameters = list(registered_parts(self._operator).parameters())
        self._writes.take(parameters)
        if has_several:
            self._call_from_one_start(outputs, index, parameters)
        else:
            self._call_once(outputs[0], index)
            self._writes.find_writes()
        self._writes.note_step()
        if not has_several:
            self._writes.take([])  # frees the copies: the next such batch may be an epoch away

    def share_writes(self) -> None:
        """At the end of a pass: a worker that had no samples gets what the hook has written.

        Collective:
            Every rank, where the module has the hook and a shard of the last batch was empty: one
            small exchange, and broadcasts.
        """
        state = self._operator._lockstep
        behind = state.writes_behind_steps
        if state.sync is None or not behind.are_unshared:
            return
        has_written = behind.written(state.committed).has_last_step
        if state.sync.broadcast_weights(self._writes.found, has_written=has_written):
            state.sync.broadcast_buffers()
        behind.note_shared()

    def _call_once(self, output: Output, index: int) -> None:
        returned, batch, num_samples = output
        with self._logging.counting_for(num_samples, first_time=False):
            self._module.on_train_batch_end(returned, batch, index)

    def _call_from_one_start(
        self, outputs: Sequence[Output], index: int, parameters: Sequence[torch.Tensor]
    ) -> None:
        writes, modules = self._writes, registered_parts(self._operator).modules()
        buffers_before = copy_buffers(buffer_places(modules))
        self._call_once(outputs[0], index)
        writes.find_writes()
        first, values = writes.copy_found(), writes.values_before()
        # What is first written to after the first steps has no copy. Nor is a weight put back that
        # has become another one's memory (`target.data = weight.data`): both would change. Such
        # writes are called again where they have led; the same value is then right.
        uses = Counter(map(_memory_of, parameters))
        before = {
            each: values[each] for each in first if each in values and uses[_memory_of(each)] == 1
        }
        for output in outputs[1:]:
            if first:
                write_back(before)
                put_buffers(buffers_before)
            self._call_once(output, index)
            writes.find_writes()
            for weight in writes.found:
                expected = first.get(weight, values.get(weight))
                if expected is None or not has_value(weight, expected):
                    raise self._different_error(weight)

    def _different_error(self, weight: torch.Tensor) -> LostUpdateError:
        named = self._module.named_parameters()
        return LostUpdateError(
            "on_train_batch_end has written different values to a weight for two shards",
            where=rank_and_step(self._operator),
            got=next((f"`{name}`" for name, each in named if each is weight), "a weight"),
            cause="this worker calls it for each of its shards, and what it writes depends on their"
            " samples, on random numbers, or on how often it was called",
            fix="write to weights in on_before_zero_grad, which is called once in a step; or as"
            " many workers as shards",
        )


def _memory_of(weight: torch.Tensor) -> int:
    return weight.data_ptr() if is_block(weight) else id(weight)
