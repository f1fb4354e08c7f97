# SPDX-License-Identifier: Apache-2.0
"""`Transport`: the interface of the ways in which gradients travel between the ranks.

`ReductionRounds` is the round controller: it knows which backwards belong to one round, what each
rank's gradients weigh, which faults make the ranks refuse, and whether they may use a round's
gradients. A transport moves numbers: it sums the ranks' gradients, divides them by the sum of the
weights, and puts them into ``parameter.grad``. A transport knows no windows and no hooks of the
user's.

A new transport (`ShardedTransport`, which scatters the sums, is one) implements `Transport`; the
round controller, the guard before the optimizers and the tests that compare with one process in
float64 apply to it unchanged.
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
    from lockstep.sync.buckets import Slot
    from lockstep.sync.ordered_reducer import OrderedReducer
    from lockstep.sync.round_contribution import Contribution, Fault, RoundTotals, UnreadTotals
    from lockstep.sync.shard_tree_sum import ShardOrder
    from lockstep.sync.weighted_loss_scale import BatchWeights

Gradients = dict["Slot", "torch.Tensor"]


class RoundController(Protocol):
    """The part of the round controller, `ReductionRounds`, that a transport may use."""

    @property
    def place(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def weights(self) -> BatchWeights: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def needs_guard(self) -> bool: ...
    @property
    def has_late_parameters(self) -> bool: ...
    def has_user_hooks(self, slot: Slot) -> bool: ...
    def attached_group(self) -> Group: ...
    def backward_began(self, slot: Slot) -> None: ...


@dataclass(frozen=True)
class RoundResult:
    """The outcome of a round, from the transport; the round controller judges it.

    Attributes:
        took_place: all ranks took part in the collective; they have exchanged the faults that were
            found after earlier rounds, too.
        has_gradients: some rank has brought gradients.
        used_all: this rank has brought a gradient for every parameter.
        sums_to_judge: pairs of sums over the ranks (of weights and faults) and this rank's
            contribution to them. By the sums the round controller decides whether to refuse the
            gradients.
        unread: such sums that are judged later, so that the host need not wait for an accelerator.
        read_together: all ranks judge `sums_to_judge` after this round, so another collective may
            follow in which they exchange why they refuse it.
        unreduced: the parameters whose gradients are still this rank's own.
    """

    took_place: bool
    has_gradients: bool
    used_all: bool
    sums_to_judge: Sequence[tuple[RoundTotals, Contribution]] = ()
    unread: UnreadTotals | None = None
    read_together: bool = True
    unreduced: Collection[Slot] = ()


class Transport(Protocol):
    """Reduces the gradients of the ranks to one.

    A round is `begin`, a backward inside `backward`, and `finish`; or `follow`, where this rank
    runs no backward. `reset` ends any of them. A transport derives from this class, because methods
    with a body here suit most transports.

    Attributes:
        can_rejoin: another group may take the place of one that has broken.
        steps_alike: every rank computes all weights by itself, so that ranks whose gradients
            differed have other weights.
        ends_late: gradients are complete only after autograd's end-of-backward callbacks, which
            the transport queues.
        stale_advice: for the guard: why a gradient was not reduced, and what to type.
    """

    can_rejoin: ClassVar[bool] = False
    steps_alike: bool = True
    ends_late: ClassVar[bool] = False
    stale_advice: ClassVar[tuple[str, str]]

    @property
    def needs_on_accumulated(self) -> bool:
        """Whether the transport may set `on_accumulated` in some backward."""

    @property
    def on_accumulated(self) -> Callable[[Slot], None] | None:
        """Called with each parameter whose gradient has just been accumulated.

        None while nothing can be sent before backward has ended.
        """

    @property
    def is_half_sent(self) -> bool:
        """Whether the peers wait for buckets that this rank has not sent yet."""

    @property
    def already_reduced(self) -> Collection[Slot]:
        """The parameters whose gradient is reduced before `finish` is called."""
        return ()

    def open_window(self, kind: str, *, is_first: bool) -> None:
        """Called before a backward, maybe the first of its window; may refuse the backward.

        Args:
            kind: PLAIN or WEIGHTED, see `round_contribution`.
            is_first: of its window.
        """
        return

    def check_backward(self, slot: Slot) -> None:
        """Called at the first gradient of a backward, that of `slot`; may refuse the backward."""
        return

    def backward(self, replacement_gradients: Gradients | None) -> AbstractContextManager[None]:
        """A context around a backward that the round controller runs.

        Args:
            replacement_gradients: of a backward of weight zero: the gradients that the ranks reduce
                instead of those which arrive.
        """

    def own_memory(self, gradients: Gradients) -> Gradients:
        """`gradients` in memory that the transport does not write in the next backward."""
        return gradients

    def begin(self, contribution: Contribution, step: int) -> None:
        """Begin a round of optimizer step `step`: gradients may leave as they arrive."""

    def finish(self, faults: Sequence[Fault]) -> RoundResult:
        """End the round whose backward has ended.

        Args:
            faults: that the round controller has found since `begin`. Under ``sync="ddp"`` the
                peers hear of them in the next round; or in this one, where gradients are reduced at
                its end (of parameters added later, or shared by two wrapped models).

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
        """Forget the gradients that have arrived since the last round.

        Args:
            has_failed: a backward or a round has raised midway.
        """

    def send_late(self) -> None:
        """Send nothing before a backward has ended, in the rounds from now on; on every rank.

        Other collectives run inside the backwards of some rank, see `BucketOrder`.
        """
        return

    def accept_changes(self) -> None:
        """Note that an optimizer uses the gradients as they are now."""

    @property
    def ordered_reducer(self) -> OrderedReducer:
        """Under a shard order: packs the gradients of shards, and adds them up."""
        raise _no_shards()

    def set_order(self, order: ShardOrder) -> None:
        """Under a shard order: add up in another one, between two rounds."""
        raise _no_shards()

    def last_shard(self, shard: int) -> AbstractContextManager[None]:
        """Under a shard order: the backward inside is that of this rank's last shard."""
        raise _no_shards()

    def close(self) -> None:
        """Release the parameters; their gradients become tensors of their own."""


def _no_shards() -> WrongUseError:
    return WrongUseError('sums over shards in a fixed order need sync="replicate"')


TransportFactory = Callable[[RoundController, Sequence["Slot"], int, int], Transport]
"""Makes a transport from a round controller, its parameters, a number below 64 that tells the
rounds of these parameters from those of other ones, and the most bytes of a bucket."""
