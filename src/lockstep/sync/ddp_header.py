# SPDX-License-Identifier: Apache-2.0
"""What the ranks tell each other before any gradient of a model travels under ``sync="ddp"``.

Each backward leads its peers from model to model in the order in which it finishes them. A rank
that has no backward to run follows: it learns from the sums whose turn it is. Whatever must be
refused is refused here, by every rank, before payloads of different models could meet.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

import torch

from lockstep.errors import GradientNotReducedError
from lockstep.sync import round_checks
from lockstep.sync.buckets import Sums
from lockstep.sync.reducer import PLAIN, WEIGHTED, Contribution

if TYPE_CHECKING:
    from lockstep.group import Group


@dataclass
class Header:
    """One rank's message, or the sums of all of them.

    Attributes:
        leads: a backward of this rank has finished a model.
        ends: this rank's backward has finished its last model.
        model: which one; 0 without `leads`. Its square tells whether all leaders mean the same.
        step: the optimizer step that this is meant for, and its square.
        late: this rank's model has parameters that came later, and not on every rank a gradient.
        plain, weighted, weight, faults, delivered, earlier: see `Sums`.
    """

    leads: float = 0.0
    ends: float = 0.0
    model: float = 0.0
    model_squared: float = 0.0
    step: float = 0.0
    step_squared: float = 0.0
    plain: float = 0.0
    weighted: float = 0.0
    weight: float = 0.0
    faults: float = 0.0
    delivered: float = 0.0
    earlier: float = 0.0
    late: float = 0.0

    @property
    def brings_something(self) -> bool:
        return self.plain + self.weighted > 0

    def sums(self) -> Sums:
        return Sums(
            weight=self.weight,
            plain=self.plain,
            weighted=self.weighted,
            faults=self.faults,
            thaws=0.0,
            delivered=self.delivered,
            check=0.0,
            check_squared=0.0,
            earlier=self.earlier,
        )


def make_header(
    mine: Contribution,
    step: int,
    *,
    model: int | None = None,
    ends: bool = False,
    late: bool = False,
) -> Header:
    """This rank's header: it leads with `model`, or ends, or (neither) follows."""
    short = step % 2**20
    return Header(
        leads=float(model is not None),
        ends=float(ends),
        model=float(model or 0),
        model_squared=float(model or 0) ** 2,
        step=float(short),
        step_squared=float(short) ** 2,
        plain=float(mine.kind == PLAIN),
        weighted=float(mine.kind == WEIGHTED),
        weight=mine.weight,
        faults=float(bool(mine.faults)),
        delivered=float(mine.is_delivered),
        earlier=float(mine.earlier),
        late=float(late),
    )


def exchange(group: Group, own: Header, mine: Contribution) -> Header:
    """The sums of all ranks' headers, judged.

    Collective:
        Every rank. Blocks. One all-reduce of some numbers.

    Raises:
        GradientNotReducedError: the ranks are at different models or steps.
        MixedWeightsError: some ranks bring weighted gradients, others plain ones.
        WeightError: the weights add up to zero.
        PeerLostError: another rank went away.
    """
    numbers = torch.tensor(astuple(own), dtype=torch.float64, device=group.device)
    group.all_reduce(numbers).wait()
    sums = Header(*numbers.tolist())
    assert len(fields(Header)) == len(numbers)
    together = sums.step_squared * group.size == sums.step**2
    one_model = sums.model_squared * sums.leads == sums.model**2
    # A fault says more about why the ranks are not at one place.
    is_apart = not (together and one_model) or (sums.leads and sums.ends)
    if is_apart and not sums.faults:
        raise GradientNotReducedError(
            "the ranks came with gradients of different models, or of different steps",
            where=f"rank {group.rank} of {group.size}",
            expected="every rank in the same backward of the same step",
            cause="one rank ran more backwards than another, left one out, took a branch that"
            " leaves a whole model out, or froze other layers",
            fix="run the same backwards on every rank in every step; put modules between which"
            ' branches choose into one module; or leave out sync="ddp"',
        )
    round_checks.judge(sums.sums(), mine, group, together=True)
    return sums
