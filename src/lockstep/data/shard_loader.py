# SPDX-License-Identifier: Apache-2.0
"""`shard_loader`: one rank's exact part of a loader, for programs that run under torchrun.

Every rank reads one shard of each global batch. The position in the data can be saved in the middle
of an epoch and loaded again, also by another number of ranks: the global batch keeps its size, and
is shared out over the ranks that load it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import default_collate

from lockstep.data.batch_rows import slice_rows, without_samples
from lockstep.data.epoch_order import FirstItems, steps_in_order
from lockstep.data.shard_assignment import ShardAssignment
from lockstep.data.sharded_loader import BatchParts, LoadedPart, ShardedLoader
from lockstep.errors import CheckpointError, WrongUseError
from lockstep.group import Group, resolve_group
from lockstep.process_group_argument import refuse_late_peers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_STATE_VERSION = 1


def shard_loader(loader: Any, *, group: Any = None, seed: int = 0) -> RankLoader:
    """This rank's exact part of `loader`: nothing twice, nothing left out, resumable.

    ``loader.batch_size`` is per rank. Every rank gets equally many batches; at the end of an
    epoch some can be smaller, down to zero rows, so weight them by their length.

    Call it once, before the epochs: what it returns begins at epoch 0, and each iteration is the
    next epoch. Made anew in each epoch, it has the first one's order and augmentations, unless
    ``loader.set_epoch(epoch)`` says which epoch comes.

    Args:
        loader: a ``DataLoader`` over the whole data, built alike on every rank (no
            ``DistributedSampler``), or a re-iterable of ready batches.
        group: the ranks that share the data: a process group, or an object with ``rank`` and
            ``size`` (methods or properties). None: the world group, or this process alone.
        seed: of the order and of augmentations; the same on every rank.

    Raises:
        NotShardableError: the data cannot be shared out so that each sample is seen once.
        WrongTypeError: `loader` is no loader, or `group` none of these.
        ConfigurationError: this rank is not in `group`.
        DataOrderError: the ranks' loaders differ; on every rank.
        WrongUseError: `group` is None, and this process has peers and no process group.
        PeerLostError: another rank went away.

    Collective:
        Every rank of a process group or `Group`: one exchange of what shows that all loaders are
        alike. None for another object with ``rank`` and ``size``. A stream, and an order that is no
        sampler's of torch, may be filled or set until they are read: there the first batch takes
        another exchange, so that every rank reads it with no other collective under way. All else
        computes the same on all ranks, and communicates nothing.
    """
    communicates = isinstance(group, Group | dist.ProcessGroup)
    if not communicates and hasattr(group, "rank") and hasattr(group, "size"):
        rank, size = (each() if callable(each) else each for each in (group.rank, group.size))
        return RankLoader(loader, rank=rank, size=size, seed=seed)
    ranks = resolve_group(group)
    made = RankLoader(
        loader, rank=ranks.rank, size=ranks.size, seed=seed, is_assumed=ranks.is_assumed
    )
    if ranks.size > 1:
        made.agree(ranks)
    return made


class LoaderAttributeError(WrongUseError, AttributeError):
    """A field of the user's loader, asked of (or set on) the part of it that a rank reads."""


class RankLoader:
    """An iterable over one rank's batches; made by `shard_loader`.

    Every ``iter()`` begins the next epoch (or the one given to `set_epoch`). All ranks have to call
    ``iter()`` equally often: a rank that looks at a first batch by itself is an epoch ahead.

    The first batch of all raises a `DataOrderError` where the ranks read their data in different
    orders and `shard_loader` could not know it. Behind a loaded position the first batch raises one
    where the loader gives another order whenever it is read, or ready batches of another size;
    where its order was changed, a warning says so.

    Args:
        loader: the user's loader.
        rank, size: this process's rank, and the number of ranks that share the data.
        seed: the seed of the order and of augmentations.
        is_assumed: there is one rank because there was no world group.
    """

    is_already_sharded = True
    """By this attribute the trainer refuses a loader that it would share out a second time."""

    def __init__(
        self, loader: Any, *, rank: int, size: int, seed: int, is_assumed: bool = False
    ) -> None:
        self.loader = loader
        self._is_assumed = is_assumed
        self._assignment = ShardAssignment(size, range(rank, rank + 1), seed)
        self._sharded = self._make_sharded_loader(None)
        self._epoch = 0  # the epoch that is read now, or will be read next
        self._step = 0
        self._offset = 0  # the first item that no batch has held yet
        self._began: FirstItems | None = None  # how the epoch began, where its order may change
        self._agrees_at_read: Group | None = None
        # Identifies the newest iteration, which alone moves the position; None before the first.
        self._reader: object = None

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` ask for dunder names before `loader` is set.
        if name.startswith("__") or name == "loader" or not hasattr(self.loader, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise _field_error(name, self.loader)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "loader" and hasattr(self.loader, name):
            raise _field_error(name, self.loader)
        super().__setattr__(name, value)

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.loader.dataset

    @property
    def epoch(self) -> int:
        """The epoch that is read now, or will be read next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration read `epoch`: from its start, or from a position just loaded."""
        if epoch != self._epoch or self._reader is not None:
            self._move_to(epoch)

    def __len__(self) -> int:
        """Batches of the whole epoch on every rank, those before a loaded position included."""
        rest = self._sharded.steps_from(self._offset)
        if rest is None:
            raise TypeError(f"the {type(self.loader).__name__} has no length")
        return self._step + rest

    def __iter__(self) -> Iterator[Any]:
        if self._is_assumed:
            refuse_late_peers()
        if self._reader is not None:
            self._move_to(self._epoch + 1)
        self._reader = reader = object()
        return self._read(reader, self._epoch, self._step, self._offset)

    def agree(self, group: Group) -> None:
        """Check that all ranks have the same loader; the order of samples as soon as it is known.

        Gradient:
            None: metadata only.

        Collective:
            Every rank of `group`. Blocks. One exchange, and one before the first batch where the
            program may still say what the epoch reads.

        Raises:
            DataOrderError: the loaders differ; on every rank.
            PeerLostError: another rank went away.
        """
        self._sharded.agree_early(group, self._epoch)
        self._agrees_at_read = None if self._sharded.can_be_drawn_early else group

    def fingerprint(self) -> dict[str, Any]:
        """The plan by which this rank reads the epoch, as plain JSON; equal on all ranks."""
        return self._sharded.fingerprint(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last yielded batch, in plain values; equal on all ranks."""
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch,
            "step": self._step,
            "offset": self._offset,
            "global_batch_size": self._sharded.global_batch_size,
            "seed": self._assignment.seed,
            "first_items": self._began,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a position; the next iteration reads the rest of its epoch.

        The global batch size and the seed are those of `state`, whatever the number of ranks.

        Raises:
            CheckpointError: `state` is no such position, or was saved by a later version.
        """
        missing = {"version", "epoch", "step", "offset", "global_batch_size", "seed"} - set(state)
        if missing or state["version"] != _STATE_VERSION:
            raise CheckpointError(
                "this is not a position in a loader that this version can take up",
                expected=f"the state_dict() of a shard_loader, version {_STATE_VERSION}",
                got=f"keys {sorted(state)}, version {state.get('version')}",
            )
        size, shards = self._assignment.num_shards, self._assignment.shards
        self._assignment = ShardAssignment(size, shards, int(state["seed"]))
        self._sharded.close()
        self._sharded = self._make_sharded_loader(state["global_batch_size"])
        self._move_to(int(state["epoch"]), int(state["step"]), int(state["offset"]))
        self._began = state.get("first_items")  # a state of an earlier version has none

    def close(self) -> None:
        """End the loader's persistent worker processes, if it has any."""
        self._sharded.close()

    def _make_sharded_loader(self, global_batch_size: int | None) -> ShardedLoader:
        return ShardedLoader(
            self.loader,
            self._assignment,
            parts=BatchParts.JOINT_OR_BORROWED,
            global_batch_size=global_batch_size,
        )

    def _move_to(self, epoch: int, step: int = 0, offset: int = 0) -> None:
        self._epoch, self._step, self._offset = epoch, step, offset
        self._began = self._reader = None

    def _read(self, reader: object, epoch: int, start_step: int, offset: int) -> Iterator[Any]:
        sharded, began = self._sharded, self._began if start_step else None
        if self._agrees_at_read is not None:
            sharded.agree(self._agrees_at_read, epoch)
            self._agrees_at_read = None
        per_step = sharded.items_per_step
        read = partial(sharded.batches, epoch, start_step, offset=offset)
        for step in steps_in_order(sharded, read, began, (epoch, start_step)):
            (part,) = step.parts
            batch = self._without_samples(part) if part.is_borrowed else part.batch
            if self._reader is reader:  # else a newer iteration moves the position
                self._step, self._began = step.index + 1, sharded.first_items
                self._offset = offset + (self._step - start_step) * per_step
            yield batch
        if self._reader is reader:
            self._move_to(epoch + 1)

    def _without_samples(self, part: LoadedPart) -> Any:
        if getattr(self.loader, "collate_fn", None) is default_collate:
            return slice_rows(part.batch, slice(0))  # its lists are columns
        return without_samples(part.batch, part.num_asked)


def _field_error(name: str, loader: Any) -> LoaderAttributeError:
    fix = f"loader.loader.{name}"
    if hasattr(getattr(loader, name), "set_epoch"):
        fix = f"loader.set_epoch(epoch) for loader.{name}.set_epoch(epoch); else {fix}"
    return LoaderAttributeError(
        f"{name} is a field of the loader that was shared out",
        expected="what shard_loader(...) returns has dataset, epoch, set_epoch, state_dict,"
        " load_state_dict and close",
        got=f"{name} of a {type(loader).__name__}",
        cause="a rank's part has no sampler and no batches of its own: its order and its sizes are"
        " shares of the whole loader's",
        fix=fix,
    )
