# SPDX-License-Identifier: Apache-2.0
"""How gradients travel between the ranks, apart from what the global gradient is.

`ReductionRounds` is the objective: it knows which backwards belong to one round, what each rank's
gradients weigh, what has to be refused, and whether the ranks may use what a round has left. A
transport moves numbers: it sums the ranks' gradients, divides them by the sum of the weights, and
puts them into ``parameter.grad``. It knows no window and no hook of the user's.

A new transport (one that scatters the sums over the ranks, say) implements `Transport`; the
objective, the guard before the optimizers and the tests of the oracle hold for it as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from lockstep.errors import WrongUseError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from lockstep.group import Group
    from lockstep.sync.batch_weights import BatchWeights
    from lockstep.sync.buckets import Slot
    from lockstep.sync.contribution import Contribution, Fault, Sums, UnreadSums

Gradients = dict["Slot", "torch.Tensor"]


class RoundOwner(Protocol):
    """What a transport may ask of the objective that it works for."""

    @property
    def place(self) -> str: ...
    @property
    def weights(self) -> BatchWeights: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def needs_guard(self) -> bool: ...
    @property
    def has_late_parameters(self) -> bool: ...
    def has_user_hooks(self, slot: Slot) -> bool: ...
    def attached(self) -> Group: ...


@dataclass(frozen=True)
class RoundResult:
    """What a transport has done in a round; the objective judges it.

    Attributes:
        took_place: the ranks have met, and compared what earlier rounds left.
        has_gradients: some rank has brought gradients.
        used_all: this rank has brought a gradient for every parameter.
        verdicts: sums over the ranks that are still to be judged, each with what this rank
            contributed to it.
        unread: sums that are judged later, so that the host need not wait for an accelerator.
        read_together: every rank reads these sums at this place, so that the ranks can exchange
            what they have to refuse.
        unreduced: the parameters whose gradients are still this rank's own.
    """

    took_place: bool
    has_gradients: bool
    used_all: bool
    verdicts: Sequence[tuple[Sums, Contribution]] = ()
    unread: UnreadSums | None = None
    read_together: bool = True
    unreduced: Collection[Slot] = ()


class Transport(Protocol):
    """How the gradients of the ranks become one.

    A round is `begin`, a backward inside `backward`, and `finish`; or `follow`, where this rank
    runs no backward. `reset` ends any of them. A transport derives from this class, for what has
    a body here is what most transports do.

    Attributes:
        can_rejoin: another group may take the place of one that has broken.
        ends_late: gradients are complete only after callbacks that the transport itself queues
            at the end of a backward.
        stale_advice: for the guard: why a gradient was not reduced, and what to type.
    """

    can_rejoin: ClassVar[bool] = False
    ends_late: ClassVar[bool] = False
    stale_advice: ClassVar[tuple[str, str]]

    @property
    def hears_arrivals(self) -> bool:
        """`listener` may ever be set."""

    @property
    def listener(self) -> Callable[[Slot], None] | None:
        """Called with each parameter whose gradient has just been accumulated.

        None while nothing can be sent before backward has ended.
        """

    @property
    def is_half_sent(self) -> bool:
        """The peers wait for what this rank has not sent yet."""

    @property
    def landed(self) -> Collection[Slot]:
        """The parameters whose gradient is the global one before `finish` is called."""
        return ()

    def open_window(self, *, is_first: bool) -> None:
        """A backward will begin, maybe the first of its window; may refuse it."""
        return

    def check_backward(self, slot: Slot) -> None:
        """A backward brings its first gradient, that of `slot`; may refuse it."""
        return

    def backward(self, stand_in: Gradients | None) -> AbstractContextManager[None]:
        """Around a backward that the objective runs.

        Args:
            stand_in: of a backward of weight zero: the gradients that the ranks reduce instead
                of those which arrive.
        """

    def own_memory(self, gradients: Gradients) -> Gradients:
        """`gradients`, where the transport will not write; they outlive the next backward."""
        return gradients

    def begin(self, contribution: Contribution, step: int) -> None:
        """Begin a round of optimizer step `step`: gradients may leave as they arrive."""

    def finish(self, faults: Sequence[Fault]) -> RoundResult:
        """End the round whose backward has ended.

        Args:
            faults: what the objective has to refuse since `begin`.

        Gradient:
            ``parameter.grad`` becomes the sum over the ranks, divided by the sum of their
            weights; None where no rank used the parameter.

        Collective:
            Every rank: this, or `follow`. Blocks.
        """

    def follow(self, contribution: Contribution, step: int, faults: Sequence[Fault]) -> RoundResult:
        """Take part in a round without a backward; see `finish`."""
        self.begin(contribution, step)
        return self.finish(faults)

    def reset(self, *, has_failed: bool) -> None:
        """Forget what has arrived since the last round.

        Args:
            has_failed: a backward or a round has raised midway.
        """

    def accept_changes(self) -> None:
        """An optimizer uses the gradients as they are now."""

    def take_shard(self, shard: int, weight: float) -> None:
        """Under a shard order: what is in ``parameter.grad`` is the gradient of `shard`.

        Args:
            weight: of all backwards of the window so far, in units.
        """
        raise _no_shards()

    def last_shard(self, shard: int) -> AbstractContextManager[None]:
        """Under a shard order: the backward inside is that of this rank's last shard."""
        raise _no_shards()

    def close(self) -> None:
        """Let go of the parameters; their gradients become tensors of their own."""


def _no_shards() -> WrongUseError:
    return WrongUseError('sums over shards in a fixed order need sync="replicate"')


TransportFactory = Callable[[RoundOwner, Sequence["Slot"], int], Transport]
"""Makes a transport for an objective, its parameters, and a number that tells its model from
others (below 64)."""
