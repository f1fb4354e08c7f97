# SPDX-License-Identifier: Apache-2.0
"""`StepSeed`: an optimizer's step draws the same random numbers on every rank.

A step may draw random numbers (Langevin noise, stochastic rounding). They go into weights that
ranks share, and the generators of each rank stand where its own samples have left them. So a step
has a seed of its own, the same on every rank.

A closure that a step calls computes a loss, and draws for the samples of its rank, as the loop
around the step does. What the step itself draws, before and behind the closure, has the step's
seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.errors import NotAvailableError
from lockstep.randomness import RandomState, derive_seed, seed_all

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self._has_drawn = False

    def begin(self, *, keeps_draws: bool = False) -> None:
        """Seed the step that begins now.

        Args:
            keeps_draws: whether the step calls a closure, which goes on where the loop's draws are.
        """
        self._has_drawn = False
        self._enter(keeps_draws=keeps_draws)

    def outside(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """`closure` for the step that has begun; it goes on with the draws of the loop."""
        num_calls = 0

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            self._leave()
            has_drawn = self._has_drawn  # an optimizer may step within the closure
            loss = closure(*args, **kwargs)
            num_calls += 1
            self._has_drawn = has_drawn
            # Another seed than before the call: a step would draw the same numbers once more.
            self._enter(num_calls, keeps_draws=True)
            return loss

        return evaluate

    def _enter(self, *calls: int, keeps_draws: bool) -> None:
        """Seed what the step draws next, after so many `calls` of its closure, if any."""
        number = len(self._state.global_batch.stepped_optimizers)
        run_seed = self._state.context.shard_assignment.seed
        self._before = RandomState.capture() if self._restores or keeps_draws else None
        seed_all(derive_seed(run_seed, "step", self._state.committed, number, *calls))
        self._seeded = RandomState.capture() if self._is_in_shards else None

    def _leave(self) -> None:
        """Let the loop, or a closure, go on to draw where it was."""
        before, self._before = self._before, None
        seeded, self._seeded = self._seeded, None
        if seeded is not None:
            self._has_drawn |= not RandomState.capture().has_torch_state_of(seeded)
        if before is not None:
            before.restore()

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the loop go on to draw where it was.

        Args:
            optimizer: which has stepped.

        Raises:
            NotAvailableError: the step has drawn, and each rank has stepped other rows.
        """
        self._leave()
        group = self._state.context.group
        if self._has_drawn and not group.is_alone:
            raise NotAvailableError(
                "an optimizer that draws random numbers cannot step shards",
                where=group.place,
                got=f"{type(optimizer).__name__}.step",
                cause="each rank steps its own rows, and would draw the same numbers for them",
                fix='sync="replicate" or sync="ddp"',
            )
