# SPDX-License-Identifier: Apache-2.0
"""The message that ranks exchange before gradients of a model travel under ``sync="ddp"``.

Each backward leads its peers from model to model in the order in which it finishes them. A rank
that has no backward to run follows: the sums tell it which model's turn it is. Every rank refuses
here, before payloads of different models could meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lockstep.errors import GradientNotReducedError
from lockstep.sync import round_checks
from lockstep.sync.round_contribution import RoundTotals

if TYPE_CHECKING:
    from lockstep.group import Group
    from lockstep.sync.round_contribution import Contribution


class Header(NamedTuple):
    """One rank's message, or the sums of all of them.

    Attributes:
        sums: the ranks' contributions.
        leads: a backward of this rank has finished a model.
        ends: this rank's backward has finished its last model.
        model: its signature; 0 without `leads`. The square shows whether all leaders sent the same.
        step: the optimizer step to which the round belongs, and its square.
        late: this rank's model has parameters that were added later, which may lack gradients on
            other ranks.
    """

    sums: RoundTotals
    leads: float
    ends: float
    model: float
    model_squared: float
    step: float
    step_squared: float
    late: float


def make_header(
    mine: Contribution,
    step: int,
    *,
    model: int | None = None,
    ends: bool = False,
    late: bool = False,
) -> Header:
    """This rank's header: it leads with `model`, or ends, or (neither) follows."""
    short = float(step % 2**20)
    return Header(
        sums=mine.sums(1.0),
        leads=float(model is not None),
        ends=float(ends),
        model=float(model or 0),
        model_squared=float(model or 0) ** 2,
        step=short,
        step_squared=short**2,
        late=float(late),
    )


def exchange_headers(group: Group, own: Header, mine: Contribution) -> Header:
    """Sum the ranks' headers; raise unless the ranks are at one place.

    Collective:
        Every rank. Blocks. One all-reduce of some numbers.

    Raises:
        GradientNotReducedError: the ranks are at different models or steps.
        MixedWeightsError: some ranks bring weighted gradients, others plain ones.
        WeightError: the weights add up to zero.
        PeerLostError: another rank went away.
    """
    numbers = torch.tensor([*own.sums, *own[1:]], dtype=torch.float64, device=group.device)
    group.all_reduce(numbers).wait()
    added = numbers.tolist()
    header = Header(RoundTotals(*added[: len(own.sums)]), *added[len(own.sums) :])
    sums = header.sums
    together = header.step_squared * group.size == header.step**2
    one_model = header.model_squared * header.leads == header.model**2
    # If there is a fault, it explains better why the ranks are not at one place.
    is_apart = not (together and one_model) or (header.leads and header.ends)
    if is_apart and not sums.faults:
        raise GradientNotReducedError(
            "the ranks came with gradients of different models, or of different steps",
            where=group.place,
            expected="every rank in the same backward of the same step",
            cause="one rank ran more backwards than another, left one out, stepped another"
            " optimizer, took a branch that leaves a whole model out, or froze other layers",
            fix="run the same backwards and steps on every rank; put modules between which"
            ' branches choose into one module; or leave out sync="ddp"',
        )
    round_checks.judge(sums, mine, group, together=True)
    return header
