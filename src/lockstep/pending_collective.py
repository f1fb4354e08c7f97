# SPDX-License-Identifier: Apache-2.0
"""`Pending`: a collective of a `Group` that has been started, and is not waited for yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import PeerLostError
from lockstep.phases import Phase, in_phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.tensor_stash import TensorStash


class Pending:
    """A collective in flight. `wait` makes the current stream (on CPU: the caller) wait for it.

    Args:
        work: torch's ``Work``; None for a collective that is done.
        what: the collective, as errors call it.
        stash: its tensors.
        where: the rank, as errors say where.
        on_waited: called after a wait that has succeeded; may raise.
    """

    __slots__ = ("_on_waited", "_stash", "_what", "_where", "_work")

    def __init__(
        self,
        work: Any,
        what: str,
        stash: TensorStash | None = None,
        where: str | None = None,
        on_waited: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._what = what
        self._stash = stash
        self._where = where
        self._on_waited = on_waited

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
            raise peer_lost_error(self._what, self._where, error) from error
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


def peer_lost_error(what: str, where: str | None, error: RuntimeError) -> PeerLostError:
    """What a failure inside a collective of the backend's becomes."""
    return PeerLostError(
        f"{what} failed",
        where=where,
        got=str(error).splitlines()[0] if str(error) else type(error).__name__,
        cause="another rank died, raised, closed its group, or did not come within the timeout",
        fix="look for the first failure among the other ranks",
    )
