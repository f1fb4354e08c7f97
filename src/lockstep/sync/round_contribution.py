# SPDX-License-Identifier: Apache-2.0
"""The numbers that travel beside the gradients of a round: one rank's, and the ranks' sums.

Every transport carries the same numbers. The sums decide whether the ranks may use the gradients of
the round; see `round_checks`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from lockstep.sync.tensor_bits import sum_of_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PLAIN: Final = "plain"
WEIGHTED: Final = "weighted"


def digest_of(size: int, *facts: int) -> int:
    """A number in the place of `facts`: ranks compare their own one with the mean of `size` ranks.

    Two kinds of ranks, with one list of facts and with another one, both differ from the mean.
    The number is never zero, and so small that the sum of all ranks' is exact in float32.
    """
    return 1 + zlib.crc32(repr(facts).encode()) % (2**24 // size - 1)


class RoundDigest:
    """The digest that a rank brings to its rounds: ranks that differ refuse the round.

    Args:
        size: the number of ranks.
        number: of this sync among those of the group.
        weights: what ranks that make the sync together have made equal. The first round compares
            them as they are then: one rank may have loaded others meanwhile.
        take_added: gives tensors that were added since its last call, for the next round.
    """

    def __init__(
        self,
        size: int,
        number: int,
        weights: Iterable[torch.Tensor] = (),
        take_added: Callable[[], list[torch.Tensor]] = list,
    ) -> None:
        self._size, self._number = size, number
        self._weights = list(weights)
        self._take_added = take_added
        self._asked_for: list[torch.Tensor] = []

    def compare_next(self, weights: Iterable[torch.Tensor]) -> None:
        """Let the rounds until the next call compare `weights`; every rank does, or none."""
        self._asked_for = list(weights)

    def of_round(self, earlier_rounds: int) -> int:
        """The digest of the round that follows so many rounds."""
        if earlier_rounds:
            self._weights = []
        compared = [*self._weights, *self._asked_for, *self._take_added()] if self._size > 1 else []
        return digest_of(self._size, self._number, *map(sum_of_bits, compared))


class Fault(NamedTuple):
    """A reason for which a rank has to refuse a round; travels to the other ranks as JSON.

    Attributes:
        kind: see `round_checks`.
        got: of the error: names of parameters, say.
    """

    kind: str
    got: str = ""

    @classmethod
    def of(cls, kind: str, names: Iterable[str]) -> Fault:
        """A fault of the parameters with these names."""
        return cls(kind, ", ".join(f"`{name}`" for name in names))


class RoundTotals(NamedTuple):
    """The ranks' contributions, added up; every field is a sum over ranks.

    Attributes:
        weight: the weights of all contributions, in units (see `BatchWeights`).
        plain: number of ranks with gradients of plain backwards.
        weighted: number of ranks with gradients that were weighted at the root.
        faults: how many ranks have a fault to report; no gradient is delivered then.
        unfrozen: how many ranks unfroze a parameter that is not in any bucket yet.
        delivered: how many ranks knew the weight of their plain gradients beforehand.
        others: how many ranks ran other collectives in their backward, while buckets could leave.
        digest: see `digest_of`.
        asked: how many ranks ask to compare the weights in the next round; see `AutogradGradWatch`.
        check: which model and which round each rank believes this to be; a small integer.
        check_squared: the square of a part of it: ranks that disagree can have the same sum, and
            not the same sum of squares as well.
        earlier: see `EarlierGradients.number`.
    """

    weight: float
    plain: float
    weighted: float
    faults: float
    unfrozen: float
    delivered: float
    others: float
    digest: float
    asked: float
    check: float
    check_squared: float
    earlier: float


@dataclass
class Contribution:
    """One rank's part of a round, apart from the gradients.

    Attributes:
        kind: PLAIN, WEIGHTED, or None for a rank without gradients.
        weight: of the rank's gradients, in units.
        scale: factor of the gradients in the bucket (1 if the root was weighted).
        faults: reasons for all ranks to refuse the round.
        earlier: see `EarlierGradients.number`; the same on all ranks, or they refuse.
        is_edited: the program has changed gradients of earlier rounds.
        is_delivered: the program has set the weight of its plain backwards beforehand.
        is_borrowed: the rank's batch is borrowed (see `lockstep.data.sharded_loader`): its
            gradients count as if there were none.
        has_unfrozen: this rank unfroze a parameter that is not in any bucket yet.
        has_others: see `RoundTotals.others`.
        digest: of the number of this sync among those of the group, and of where its buckets left
            among other collectives; the same on all ranks, or they refuse.
        asks: see `RoundTotals.asked`.
        check: number of the model and the round to which the contribution belongs.
        unpacked_weight: the part of `weight` that is not of a shard whose gradient was packed.
        num_backwards: in the rank's window; none from before the program gave a window up.
    """

    kind: str | None = None
    weight: float = 0.0
    scale: float = 1.0
    faults: list[Fault] = field(default_factory=list)
    earlier: int = 0
    is_edited: bool = False
    is_delivered: bool = False
    is_borrowed: bool = False
    has_unfrozen: bool = False
    has_others: bool = False
    digest: int = 0
    asks: bool = False
    check: int = 0
    unpacked_weight: float = 0.0
    num_backwards: int = 0

    @property
    def check_squared(self) -> int:
        """The square of the round's part of `check`, made small, so that sums are exact."""
        return ((self.check + 128) % 256 - 128) ** 2

    @property
    def has_zero_weight(self) -> bool:
        return self.weight == 0.0

    def sums(self, share: float) -> RoundTotals:
        """The contribution as totals of one rank, whose gradients are multiplied by `share`."""
        return RoundTotals(
            weight=self.weight * share,
            plain=float(self.kind == PLAIN),
            weighted=float(self.kind == WEIGHTED),
            faults=float(bool(self.faults)),
            unfrozen=float(self.has_unfrozen),
            others=float(self.has_others),
            digest=float(self.digest),
            asked=float(self.asks),
            check=float(self.check),
            check_squared=float(self.check_squared),
            earlier=float(self.earlier),
            delivered=float(self.is_delivered),
        )


class UnreadTotals:
    """Sums of a round that travel from an accelerator to the host, which need not wait for them.

    Args:
        sums: on the accelerator, maybe not computed yet.
        contribution: of this rank to the sums.
    """

    def __init__(self, sums: torch.Tensor, contribution: Contribution) -> None:
        self.contribution = contribution
        self._host = torch.empty(sums.shape, dtype=sums.dtype, device="cpu", pin_memory=True)
        self._host.copy_(sums, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(sums.device))

    def read(self) -> RoundTotals:
        """The sums; waits for the accelerator, which has usually computed them by then."""
        self._arrived.synchronize()
        return RoundTotals(*self._host.tolist())
