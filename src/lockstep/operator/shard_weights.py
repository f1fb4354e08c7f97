# SPDX-License-Identifier: Apache-2.0
"""`ShardWeights`: weights that a forward writes change once in a batch, whatever the sharding.

So do the settings of the optimizers, which a loss may change.

A momentum encoder follows the weights in every forward; prototypes are normalised there. In one
process that happens once. Here every shard starts from the weights that the batch began with, so
that the forward of each writes the same values, on each worker; a worker whose shards are empty
gets them from another one, and the settings of the optimizers as well.

Where the shards write different values (of their samples, or of random numbers), none of them, nor
a chain of all, is what one process writes: that is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.errors import LostUpdateError, NotAvailableError
from lockstep.operator.group_settings import read_group_settings, share_group_settings
from lockstep.operator.group_settings_copy import GroupSettingsCopy
from lockstep.operator.in_place_writes import has_value, write_back

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lockstep.group import Group
    from lockstep.operator.in_place_writes import InPlaceWriteTracker
    from lockstep.operator.training_parts import TrainingParts
    from lockstep.sync import Synchroniser


class ShardWeights:
    """The weights that forwards write, during one batch of a worker.

    Args:
        writes: finds them.
        run: whose weights they are.
        where: names this rank and step, for an error.
        is_compared: this worker computes several shards, or one of another worker.
        sharing: the group in which workers whose shards are empty get the weights of another
            worker; None where there is no such worker.
    """

    def __init__(
        self,
        writes: InPlaceWriteTracker,
        run: TrainingParts,
        where: Callable[[], str],
        *,
        is_compared: bool,
        sharing: Group | None,
    ) -> None:
        self._writes = writes
        self._run = run
        self._where = where
        self._is_compared = is_compared
        self._sharing = sharing
        self._settings = [] if sharing is None else read_group_settings(run.optimizers)
        self._before: dict[torch.Tensor, torch.Tensor] = {}
        self._first: dict[torch.Tensor, torch.Tensor] | None = None
        self._settings_before = GroupSettingsCopy(run.optimizers) if is_compared else None
        self._first_settings: GroupSettingsCopy | None = None
        if is_compared or sharing is not None:
            if not writes.is_ahead_of_step:  # without an undo nobody else takes the copies
                writes.take(list(run.parameters()))
            # What the program has written since then, ahead of all shards, is theirs to start from.
            writes.find_writes()
            self._before = writes.copy_found()

    def put_committed(self) -> None:
        """Before another shard: put back the weights and settings with which the batch began."""
        write_back(self._before)
        if self._settings_before is not None:
            self._settings_before.restore()

    def after_forward(self) -> None:
        """After a shard's forward: find what it has written.

        Raises:
            LostUpdateError: it has written another value than the first shard's, or other settings.
            NotAvailableError: nobody has the value from before.
        """
        if not self._is_compared:
            return
        self._compare_settings()
        self._writes.find_writes()
        values = self._writes.values_before()
        for weight in self._writes.found:
            if weight not in self._before:
                if weight not in values:
                    raise self._late_error(weight)
                self._before[weight] = values[weight]
        if self._first is None:
            self._first = self._writes.copy_found()
            return
        for weight, before in self._before.items():
            if not has_value(weight, self._first.get(weight, before)):
                raise self._different_error(weight)

    def _compare_settings(self) -> None:
        settings = GroupSettingsCopy(self._run.optimizers)
        if self._first_settings is None:
            self._first_settings = settings
        elif not settings.has_values_of(self._first_settings):
            raise LostUpdateError(
                "the losses of two shards have written different settings of an optimizer",
                where=self._where(),
                cause="what they set depends on their samples, on random numbers, or on a count of"
                " shards, and all of it but one shard's would be lost",
                fix="let it follow from self.global_step, or set it in a train_batch of your own",
            )

    def share(self, sync: Synchroniser | None, *, has_written: bool) -> None:
        """At the end of a batch: a worker that computed no shard gets what the others have written,
        to weights and to the settings of the optimizers.

        Collective:
            Every rank, where shards of the batch are empty: two exchanges, and broadcasts.
        """
        if sync is None or self._sharing is None:
            return
        self._writes.find_writes()
        found = sync.broadcast_weights(self._writes.found, has_written=has_written)
        self._writes.expect(found)
        share_group_settings(
            self._sharing, self._run.optimizers, self._settings, has_computed=has_written
        )

    def _name(self, weight: torch.Tensor) -> str:
        pairs = (each for module in self._run.plain_modules() for each in module.named_parameters())
        return next((f"`{name}`" for name, each in pairs if each is weight), "a weight")

    def _late_error(self, weight: torch.Tensor) -> NotAvailableError:
        return NotAvailableError(
            "a forward writes to a weight for the first time after the first steps",
            where=self._where(),
            got=self._name(weight),
            cause="this worker computes several shards, each of which is to start from the weight"
            " as it was, and nobody has copied that",
            fix="write to it in every step from the first on; or keep it in a buffer; or as many"
            " workers as shards",
        )

    def _different_error(self, weight: torch.Tensor) -> LostUpdateError:
        return LostUpdateError(
            "the forwards of two shards have written different values to a weight",
            where=self._where(),
            got=self._name(weight),
            cause="what they write depends on their samples, or on random numbers, and all of it"
            " but one shard's would be lost",
            fix="keep it in a buffer (register_buffer), of which each step commits shard 0's; or"
            " compute it of lockstep.gather's rows, with joint_loss = True",
        )
