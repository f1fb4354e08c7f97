# SPDX-License-Identifier: Apache-2.0
"""`steps_in_order`: goes on in the middle of an epoch in the order in which the epoch began."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from lockstep.content_digest import content_digest
from lockstep.data.batch_rows import rows_of
from lockstep.errors import DataOrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

NUM_COMPARED: Final = 16
"""Indices that tell one order of an epoch from another: more than a chance may repeat."""
_DIGITS: Final = 4
"""Of each of their digests."""

T = TypeVar("T")
_log = logging.getLogger("lockstep")

FirstItems: TypeAlias = "str | int"
"""How an epoch begins: digests of its first indices, as many as were drawn so far, one behind the
other; or the number of samples in its first ready batch."""


class EpochBeginning:
    """What the first items of an epoch are, noted as they are drawn.

    Attributes:
        first_items: None before the first one.
    """

    def __init__(self) -> None:
        self.first_items: FirstItems | None = None

    def note_indices(self, drawn: Sequence[Any]) -> None:
        """Note further indices of the epoch, or batches of them."""
        noted = self.first_items if isinstance(self.first_items, str) else ""
        missing = NUM_COMPARED - len(noted) // _DIGITS
        if missing and drawn:
            digests = [content_digest(item)[:_DIGITS] for item in drawn[:missing]]
            self.first_items = noted + "".join(digests)

    def note_ready_batches(self, drawn: Sequence[Any]) -> None:
        """Note further ready batches of the epoch, of which the first one counts."""
        if self.first_items is None and drawn:
            self.first_items = rows_of(drawn[0])


def _is_other(began: FirstItems, found: FirstItems) -> bool:
    """Whether two epochs begin otherwise, as far as both are known."""
    if isinstance(began, str) and isinstance(found, str):
        known = min(len(began), len(found))
        return began[:known] != found[:known]
    return began != found


class HasFirstItems(Protocol):
    """What reads an epoch, and has seen how it begins."""

    @property
    def first_items(self) -> FirstItems | None:
        """Of the epoch that is read, wherever in it the reading began.

        None where the source does not know, or where no order can change.
        """


def steps_in_order(
    source: HasFirstItems,
    open_steps: Callable[[], Generator[T, None, None]],
    began: FirstItems | None,
    place: tuple[int, int],
) -> Generator[T, None, None]:
    """The steps of `open_steps`, if the epoch still begins as it `began`.

    Args:
        source: what reads the steps.
        open_steps: begins to read, from `place` on; called once more where the order is another.
        began: what `source.first_items` was when the epoch began; None if it is not known.
        place: the epoch, and the step in it that comes first.

    Raises:
        DataOrderError: the order of indices changes whenever the epoch is read; or the loader's
            batches are ready ones, and had another size.
    """
    steps = open_steps()
    try:
        first = next(steps, None)
        found = source.first_items
        if began is not None and found is not None and _is_other(began, found):
            # The user may have changed the loader since then: what was changed stays the same when
            # it is read once more.
            steps.close()
            steps = open_steps()
            first = next(steps, None)
            _refuse(began, found, source.first_items, place)
            _log.warning(
                "epoch %d goes on at global batch %d in another order than that in which it began:"
                " samples may come twice in it, and others not at all. Unless the loader was"
                " changed on purpose, its order depends on more than set_epoch(epoch) tells it",
                *place,
            )
        if first is not None:
            yield first
            yield from steps
    finally:
        steps.close()  # ends the loader's processes now, and not at a garbage collection


def _refuse(
    began: FirstItems, found: FirstItems, again: FirstItems | None, place: tuple[int, int]
) -> None:
    """Raise if an epoch that began otherwise than it was `found` cannot go on.

    Args:
        again: what was found when the epoch was read once more.
        place: see `steps_in_order`.
    """
    if isinstance(began, int) and isinstance(found, int):
        # A size that is another one each time is none that the loader was given: a stream draws its
        # batches anew whenever it is read, as one of synthetic samples may.
        if again == found:
            raise _other_batches_error(began, found, place)
    elif again != found:
        raise _unsteady_order_error(place)


def _other_batches_error(began: int, found: int, place: tuple[int, int]) -> DataOrderError:
    return DataOrderError(
        "an epoch goes on with ready batches of another size than it began with: samples would come"
        " twice, or not at all",
        where="epoch {}, which goes on at global batch {}".format(*place),
        expected=f"{began} samples in the epoch's first batch, as when it began",
        got=f"{found}",
        cause="the place in an epoch is counted in batches where the loader (or what it reads)"
        " makes them itself",
        fix="the earlier batch size until the end of this epoch; then save, and load with the new"
        " one. Where a stream draws sizes by chance, and drew one twice: the same call once more",
    )


def _unsteady_order_error(place: tuple[int, int]) -> DataOrderError:
    return DataOrderError(
        "the loader gives another order whenever it is read: samples would be skipped, and others"
        " seen twice",
        where="epoch {}, which goes on at global batch {}".format(*place),
        expected="the order in which the epoch began, however often the loader is iterated",
        got="another order, and when it was read once more a third one",
        cause="a sampler that shuffles a list of its own in place, counts how often it was"
        " iterated, or draws from a generator that nobody can seed",
        fix="derive the order from the epoch, in set_epoch(epoch)",
    )
