# SPDX-License-Identifier: Apache-2.0
"""`StepSeed`: an optimizer's step draws the same random numbers on every rank.

A step may draw random numbers (Langevin noise, stochastic rounding). They go into weights that
ranks share, and the generators of each rank stand where its own samples have left them. So a step
has a seed of its own, the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.errors import NotAvailableError
from lockstep.randomness import RandomState, derive_seed, seed_all

if TYPE_CHECKING:
    import torch

    from lockstep.operator.loop_protocols import Operator


class StepSeed:
    """Seeds one step after the other.

    Args:
        operator: whose optimizers step.
    """

    def __init__(self, operator: Operator) -> None:
        self._state = operator._lockstep
        self._is_in_shards = self._state.context.options.sync == "fsdp"
        # The default loop seeds each shard anew. A loop of the user's own goes on to draw, for its
        # own samples, after the step.
        self._restores = operator._lockstep_overrides_loop()
        self._before: RandomState | None = None
        self._seeded: RandomState | None = None

    def begin(self) -> None:
        """Seed the step that begins now."""
        number = len(self._state.global_batch.stepped_optimizers)
        run_seed = self._state.context.shard_assignment.seed
        self._before = RandomState.capture() if self._restores else None
        seed_all(derive_seed(run_seed, "step", self._state.committed, number))
        self._seeded = RandomState.capture() if self._is_in_shards else None

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the loop go on to draw where it was.

        Args:
            optimizer: which has stepped.

        Raises:
            NotAvailableError: the step has drawn, and each rank has stepped other rows.
        """
        before, self._before = self._before, None
        seeded, self._seeded = self._seeded, None
        has_drawn = seeded is not None and not RandomState.capture().has_torch_state_of(seeded)
        if before is not None:
            before.restore()
        group = self._state.context.group
        if has_drawn and not group.is_alone:
            raise NotAvailableError(
                "an optimizer that draws random numbers cannot step shards",
                where=group.place,
                got=f"{type(optimizer).__name__}.step",
                cause="each rank steps its own rows, and would draw the same numbers for them",
                fix='sync="replicate" or sync="ddp"',
            )
