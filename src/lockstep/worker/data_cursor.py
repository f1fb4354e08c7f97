# SPDX-License-Identifier: Apache-2.0
"""`Cursor`: a worker's position in its data."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.data import ShardedLoader
from lockstep.data.epoch_order import FirstItems, HasFirstItems, steps_in_order
from lockstep.data.global_batches import OrderSize
from lockstep.errors import DataOrderError
from lockstep.phases import Phase, in_phase

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from lockstep.data import Step
    from lockstep.group import Group


_log = logging.getLogger("lockstep")


class StepSource(HasFirstItems, Protocol):
    """A loader cut into global batches, one for each step; see `lockstep.data.ShardedLoader`.

    Attributes:
        joint: a worker's shards of a step come as one batch, not one after the other.
    """

    joint: bool

    @property
    def global_batch_size(self) -> int | None: ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Those of an epoch that begins now; None where the source does not know."""

    @property
    def has_exact_length(self) -> bool:
        """Whether `steps_per_epoch` is certain, and not what a `__len__` of the user's says."""

    def batches(self, epoch: int, start_step: int = 0) -> Generator[Step, None, None]: ...

    def agree(self, group: Group, epoch: int) -> None:
        """Before a group's first step of an epoch, check that all ranks read by the same plan.

        Collective:
            Every rank of `group`; one small exchange.
        """

    def samples_of(self, shards: Sequence[int], first_step: int, steps: int) -> int | None:
        """The number of samples of `shards` in `steps` steps from `first_step` on.

        Steps may reach into further epochs. None where the source does not know.
        """

    def items_of(self, epoch: int, step: int, shards: Sequence[int]) -> list[Any]:
        """The items that `shards` hold in a step; empty where the source does not know."""

    def close(self) -> None: ...


class Cursor:
    """A worker's position in a source, kept from one call to the next.

    Attributes:
        epoch: passes over the data completed, from 0.
        step: global batches committed in the current pass.
        window_start: the first step of the open accumulation window; equal to `step` if no
            window is open.
        has_scheduled: the schedulers have begun to step at the end of this epoch, which is not
            finished yet.
    """

    def __init__(self, source: StepSource) -> None:
        self.source = source
        self.epoch = 0
        self.step = 0
        self.window_start = 0
        self.has_scheduled = False
        self._steps: Generator[Step, None, None] | None = None
        self._ahead: Step | None = None
        self._unread: Exception | None = None
        self._agreed_in: Group | None = None
        self._agrees_at_read: Group | None = None
        # Whether the epoch is over behind a step of it, as a state has said or reading has shown.
        # The source may say something else: its length may be unknown, or another one by now.
        self._known_end: tuple[int, int, bool] | None = None
        # How the present epoch began, by `StepSource.first_items`, and the one before it, into
        # which a step may be undone.
        self._first_items: dict[int, FirstItems] = {}
        # With what size the same epochs began, where their order is torch's own: the dataset may
        # have grown since then.
        self._sizes: dict[int, OrderSize] = {}

    @property
    def place(self) -> dict[str, Any]:
        """The position as a state holds it, with the size of its steps in samples, and with the
        beginning of the epoch's order and its size, where they are known; in an epoch, whether it
        is over."""
        place: dict[str, Any] = {"epoch": self.epoch, "step": self.step}
        if self.step:
            place["is_over"] = self.is_over
        if self.has_scheduled:
            place["has_scheduled"] = True
        size = self._sizes.get(self.epoch) if self.step else None
        known = {
            "samples_per_step": self._samples_per_step,
            "first_items": self._first_items.get(self.epoch),
            "epoch_size": None if size is None else tuple(size),
        }
        return place | {key: value for key, value in known.items() if value is not None}

    def load_place(self, place: Mapping[str, Any]) -> None:
        """Move to the `place` of a state, which may be another run's.

        Raises:
            DataOrderError: it lies in the middle of an epoch, behind steps of another size, and
                within a step of the source.
        """
        # A state of an earlier version does not say whether its epoch is over.
        is_over, size = place.get("is_over"), place.get("epoch_size")
        self._sizes = {} if size is None else {place["epoch"]: OrderSize(*size)}
        step = place["step"] if is_over else self._own_step(place)
        self.move_to(place["epoch"], step)
        self._known_end = None if is_over is None else (self.epoch, step, is_over)
        self.has_scheduled = place.get("has_scheduled", False)
        # A state of an earlier version has none.
        first = place.get("first_items")
        self._first_items = {} if first is None else {self.epoch: first}

    @property
    def _samples_per_step(self) -> int | None:
        """Samples of a full step; None where a place in an epoch is not counted in samples."""
        source = self.source
        return source.global_batch_size if isinstance(source, ShardedLoader) else None

    def _own_step(self, place: Mapping[str, Any]) -> int:
        """The step of `place`, in steps of the source's size."""
        step: int = place["step"]
        # A state of an earlier version does not have it.
        there, here = place.get("samples_per_step"), self._samples_per_step
        if not step or there == here or there is None or here is None:
            return step
        assert isinstance(self.source, ShardedLoader), "its steps have a size in samples"
        found = self.source.step_after(step * there, self._size_of(place["epoch"]))
        if found is None:
            raise _other_size_error(place, here)
        return found

    def _size_of(self, epoch: int) -> OrderSize | None:
        """With what size `epoch` began; None where nobody knows, or samples of then are gone."""
        size = self._sizes.get(epoch)
        if size is None or self._steps is not None or not isinstance(self.source, ShardedLoader):
            return size
        now = self.source.order_size
        return None if now is None or now.population < size.population else size

    @property
    def steps_per_epoch(self) -> int | None:
        """Those of the present epoch, which ends with the samples with which it began; None where
        the source does not know."""
        size = self._size_of(self.epoch)
        if size is None or not isinstance(self.source, ShardedLoader):
            return self.source.steps_per_epoch
        return self.source.steps_from(0, size)

    def items_ahead(self, shards: Sequence[int]) -> list[Any]:
        """The items that `shards` hold in the next step; see `StepSource.items_of`."""
        source, place = self.source, (self.epoch, self.step)
        if isinstance(source, ShardedLoader):
            return source.items_of(*place, shards, self._size_of(self.epoch))
        return source.items_of(*place, shards)

    def agree_at_read(self, group: Group) -> None:
        """Let the next `take`, or `agree_if_unread`, `agree`.

        Until then the loop may set what the epoch reads, and in which order. A source whose length
        follows from the agreement agrees at once.
        """
        if isinstance(self.source, ShardedLoader):
            self._agrees_at_read = group
        else:
            self.agree(group)

    def agree_if_unread(self) -> None:
        """Answer the peers of a rank whose loop has ended before its first `take`.

        Collective:
            As `agree`, unless the first `take` has agreed.
        """
        # Cleared first: a loop may read in two threads, of which one is to agree.
        group, self._agrees_at_read = self._agrees_at_read, None
        if group is None:
            return
        try:
            self.agree(group)
        except BaseException:
            self._agrees_at_read = group  # a loop that goes on must not read what is not agreed on
            raise

    def agree(self, group: Group) -> None:
        """Check that all ranks read by the same plan, unless they have in this group and epoch.

        Collective:
            Every rank of `group`, at the same position; see `StepSource.agree`.
        """
        if self._agreed_in is group:
            return
        if group.size > 1:
            # The check iterates over the user's data anew, which may end an open iteration.
            self._abandon()
        self.source.agree(group, self.epoch)
        self._agreed_in = group

    def forget_agreement(self) -> None:
        """Let the next `agree` check again; all ranks of a group forget together."""
        self._agreed_in = self._agrees_at_read = None

    def move_to(self, epoch: int, step: int) -> None:
        if (epoch, step) != (self.epoch, self.step):  # else the undo of a call that has failed
            self.has_scheduled = False
        self.epoch, self.step = epoch, step
        # The gradients of earlier batches are gone, so that a window begins here, also where `step`
        # was in the middle of a window of another `accumulate`.
        self.window_start = step
        if not step:
            self._sizes.pop(epoch, None)  # the epoch begins anew, with what the dataset holds then
        # Last: Ctrl-C may come while the loader's processes end.
        self.forget_agreement()
        self._abandon()

    def use(self, source: StepSource) -> None:
        """Read from `source` from now on, at the same position."""
        self._abandon()
        self.forget_agreement()
        self.source.close()
        self.source = source

    def close(self) -> None:
        """End the loader's worker processes."""
        self._abandon()
        self.source.close()

    def _abandon(self) -> None:
        steps, self._steps, self._ahead, self._unread = self._steps, None, None, None
        if steps is not None:
            # Closing the generator ends the loader's processes now, and not at a garbage
            # collection.
            steps.close()

    @in_phase(Phase.READING)
    def take(self) -> Step | None:
        """Read the global batch at the position; None at the end of the epoch.

        Collective:
            As `agree`, for the first one after `agree_at_read`.

        Raises:
            DataOrderError: see `steps_in_order`.
        """
        self.agree_if_unread()
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            return ahead
        try:
            if self._steps is None:
                self._steps = self._open()
            read = next(self._steps, None)
            self._note_beginning()
            return read
        except Exception as error:
            self._unread = error
            raise

    def _open(self) -> Generator[Step, None, None]:
        """The steps from the position on, in the order in which the epoch began."""
        source, place = self.source, (self.epoch, self.step)
        began = self._first_items.get(self.epoch) if self.step else None
        open_steps = partial(source.batches, *place)
        if self.step and isinstance(source, ShardedLoader):
            size, was = self._size_of(self.epoch), self._sizes.get(self.epoch)
            open_steps = partial(source.batches, *place, size=size)
            if was is not None and size is None and source.order_size is not None:
                _log.warning(
                    "epoch %d began with %d samples, some of which are gone: it goes on at global"
                    " batch %d with the present ones, of which some may come twice in it, and"
                    " others not at all",
                    self.epoch,
                    was.population,
                    self.step,
                )
        return steps_in_order(source, open_steps, began, place)

    def _note_beginning(self) -> None:
        """Note how the epoch that is read began."""
        source = self.source
        if source.first_items is not None:
            self._first_items[self.epoch] = source.first_items
        if not isinstance(source, ShardedLoader):
            return
        if source.opened_size is not None:
            self._sizes[self.epoch] = source.opened_size
        else:
            # Torch's own order gave it; the epoch goes on in one of the user's.
            self._sizes.pop(self.epoch, None)

    def refuse_unread(self) -> None:
        """Raise if the user's loop caught an error of the loader and went on.

        The loader ends at its first error, so the rest of the epoch was never read.

        Raises:
            DataOrderError: from what the dataset, or the loader, has raised.
        """
        if self._unread is not None:
            raise DataOrderError(
                "the loop went on after a batch that could not be read",
                where=f"epoch {self.epoch}, from global batch {self.step} on",
                got=f"{type(self._unread).__name__}: {self._unread}",
                cause="the loop caught the loader's error: this rank has trained on fewer batches"
                " than its peers",
                fix="in the dataset's __getitem__ (or __iter__): try: ..., and on an exception"
                " return another sample",
            ) from self._unread

    def ends_before(self, index: int) -> bool:
        """Whether the epoch ends before step `index`, the next one to be read.

        An epoch that was over when a state was saved stays over, whatever the source says by now.
        Reads one step ahead unless the length is exact: a `__len__` of the user's may say too few
        steps, and too many.

        Raises:
            DataOrderError: the data goes on where it ends by its length; on every rank that reads
                this data.
        """
        if index == self.step and self._known_end == (self.epoch, index, True):
            return True
        total = self.steps_per_epoch
        is_end, is_exact = total is not None and index >= total, self.source.has_exact_length
        # Nothing has been read from here: the pass that reached this end has read one step ahead
        # already; reading ahead from here would read the whole epoch.
        if (total is not None and is_exact) or (is_end and self._steps is None):
            return is_end
        if self._ahead is None:
            self._ahead = self.take()
        if self._ahead is not None and is_end:
            raise _too_long_error(index)
        return self._ahead is None

    def commit(self) -> None:
        self.step += 1

    def look_for_end(self) -> None:
        """Before a state is saved in an epoch: find out whether it is over behind its last step.

        Reads one step ahead where only reading can tell.
        """
        if self.step and not self.source.has_exact_length and self._steps is not None:
            self._known_end = self.epoch, self.step, self.ends_before(self.step)

    @property
    def is_over(self) -> bool:
        """Whether the last step of the epoch is committed, as far as is known without reading."""
        known, total = self._known_end, self.steps_per_epoch
        if known is not None and known[:2] == (self.epoch, self.step):
            return known[2]
        return total is not None and 0 < total <= self.step

    @property
    def has_open_window(self) -> bool:
        """Whether some, but not all, batches of the present accumulation window are committed."""
        return self.window_start != self.step

    def finish_epoch(self) -> None:
        known = self._first_items.get(self.epoch)
        self._first_items = {} if known is None else {self.epoch: known}
        self._sizes = {key: size for key, size in self._sizes.items() if key == self.epoch}
        self.move_to(self.epoch + 1, 0)

    @property
    def epochs_entered(self) -> int:
        return self.epoch + (self.step > 0)

    @property
    def epochs_finished(self) -> int:
        """Passes completed; a pass whose last step is committed counts before `finish_epoch`."""
        return self.epoch + self.is_over


def _other_size_error(place: Mapping[str, Any], here: int) -> DataOrderError:
    there, samples = place["samples_per_step"], place["step"] * place["samples_per_step"]
    return DataOrderError(
        "a state from the middle of an epoch has another global batch size: samples would come"
        " twice, or not at all",
        where=f"epoch {place['epoch']}, behind {samples} samples",
        expected=f"global batches of {there} samples, or of a number that divides {samples}",
        got=f"{here}",
        cause="another batch size of the loader, or another config[BATCH_SIZE], than before",
        fix=f"config={{lockstep.keys.BATCH_SIZE: {there}}}, or the loader's earlier batch_size,"
        " until the end of this epoch; then save(path), and load that with the new size",
    )


def _too_long_error(total: int) -> DataOrderError:
    return DataOrderError(
        "the loader has more batches than its `__len__` says",
        expected=f"the end of the epoch after {total} global batches",
        got="another batch, which would be left out",
        cause="the `__len__` of a dataset, a sampler or a loader is too small",
        fix="correct it, or leave `__len__` out and call train(num_steps=...)",
    )
