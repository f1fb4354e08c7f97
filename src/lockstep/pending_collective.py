# SPDX-License-Identifier: Apache-2.0
"""`Pending`: a collective of a `Group` that has been started, and is not waited for yet."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

from lockstep.errors import PeerLostError
from lockstep.phases import Phase, in_phase

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lockstep.tensor_stash import TensorStash

_LOOK_EVERY: Final = timedelta(seconds=0.5)


class _Owner(Protocol):
    """The `Group` of a collective."""

    def note_waited(self, what: str, device: torch.device) -> None: ...
    def lost_error(self, what: str, error: RuntimeError) -> PeerLostError: ...
    def refuse_if_given_up(self, what: str) -> None: ...


class Pending:
    """A collective in flight. `wait` makes the current stream (on CPU: the caller) wait for it.

    Args:
        work: torch's ``Work``, or an object with its ``wait`` and ``is_completed``; None for a
            collective that is done.
        what: the collective, as errors call it.
        owner: the group; None for a collective that is done.
        device: of the tensors.
        stash: the tensors.
    """

    __slots__ = ("_device", "_owner", "_stash", "_what", "_work")

    def __init__(
        self,
        work: Any = None,
        what: str = "",
        owner: _Owner | None = None,
        device: torch.device | None = None,
        stash: TensorStash | None = None,
    ) -> None:
        self._work = work
        self._what = what
        self._owner = owner
        self._device = device
        self._stash = stash

    def wait(self) -> None:
        """Wait for the collective; a second call returns at once.

        Raises:
            PeerLostError: another rank went away, or did not come within the group's timeout; or
                the group was given up.
        """
        if self._work is None:
            return
        owner, device = self._owner, self._device
        assert owner is not None, "of a collective that has been started"
        assert device is not None, "of a collective that has been started"
        try:
            with in_phase(Phase.WAITING):
                self._wait(owner, device)
        except PeerLostError:
            raise
        except RuntimeError as error:
            raise owner.lost_error(self._what, error) from error
        finally:
            self._work = None
            if self._stash is not None:
                self._stash.wait_released()
        owner.note_waited(self._what, device)

    def _wait(self, owner: _Owner, device: torch.device) -> None:
        """Wait, and look twice a second whether the group was given up.

        Of a hundred waits for a large tensor gloo (torch 2.13) leaves two asleep until the group's
        timeout, when another thread shuts its sockets down. On CUDA a wait with a limit would make
        the host wait for the device.
        """
        if device.type != "cpu":
            self._work.wait()
            return
        while True:
            was_completed = self._work.is_completed()
            try:
                self._work.wait(_LOOK_EVERY)
                return
            except RuntimeError:
                if was_completed:  # else it may have come to its end just behind the limit
                    raise
            if not self._work.is_completed():
                owner.refuse_if_given_up(self._what)

    def then(self, rest: Callable[[Any], Any]) -> Pending:
        """Replace the ``Work`` by the result of `rest`, and return this object."""
        self._work = rest(self._work)
        return self

    def abandon(self) -> None:
        """Drop the references to the ``Work`` and its tensors without waiting."""
        self._work = self._stash = None
