# SPDX-License-Identifier: Apache-2.0
"""`Pending`: a collective of a `Group` that has been started, and is not waited for yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.phases import Phase, in_phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.errors import PeerLostError
    from lockstep.tensor_stash import TensorStash


class Pending:
    """A collective in flight. `wait` makes the current stream (on CPU: the caller) wait for it.

    Args:
        work: torch's ``Work``; None for a collective that is done.
        what: the collective, as errors call it.
        stash: its tensors.
        on_waited: called after a wait that has succeeded; may raise.
        on_lost: called after a wait that has failed; makes the error.
    """

    __slots__ = ("_on_lost", "_on_waited", "_stash", "_what", "_work")

    def __init__(
        self,
        work: Any,
        what: str,
        stash: TensorStash | None = None,
        on_waited: Callable[[], None] | None = None,
        on_lost: Callable[[str, RuntimeError], PeerLostError] | None = None,
    ) -> None:
        self._work = work
        self._what = what
        self._stash = stash
        self._on_waited = on_waited
        self._on_lost = on_lost

    def wait(self) -> None:
        """Wait for the collective; a second call returns at once.

        Raises:
            PeerLostError: another rank went away, or did not come within the group's timeout; or
                the group was given up.
        """
        if self._work is None:
            return
        try:
            with in_phase(Phase.WAITING):
                self._work.wait()
        except RuntimeError as error:
            assert self._on_lost is not None, "of a collective that has been started"
            raise self._on_lost(self._what, error) from error
        finally:
            self._work = None
            if self._stash is not None:
                self._stash.wait_released()
        if self._on_waited is not None:
            self._on_waited()

    def then(self, rest: Callable[[Any], Any]) -> Pending:
        """Replace the ``Work`` by the result of `rest`, and return this object."""
        self._work = rest(self._work)
        return self

    def abandon(self) -> None:
        """Drop the references to the ``Work`` and its tensors without waiting."""
        self._work = self._stash = None
