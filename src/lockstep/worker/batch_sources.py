# SPDX-License-Identifier: Apache-2.0
"""From what a user registered as a loader to a source of global steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.data import ShardedLoader, UserShardedLoader
from lockstep.errors import DataOrderError, NotShardableError
from lockstep.operator.rank_context import ONE_PROCESS

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from lockstep.data import Step
    from lockstep.group import Group
    from lockstep.operator import TrainingOperator
    from lockstep.worker.data_cursor import StepSource


class UnshardedSource:
    """Every worker reads its own loader; the longest decides how many steps there are.

    A worker whose loader runs out borrows its last batch, with no weight, so that nobody
    waits for it in a reduction.
    """

    joint = True
    global_batch_size: int | None = None

    def __init__(self, loader: UserShardedLoader) -> None:
        self._loader = loader
        self._steps: int | None = None

    @property
    def steps_per_epoch(self) -> int | None:
        return self._loader.steps_per_epoch if self._steps is None else self._steps

    def batches(self, epoch: int, start_step: int = 0) -> Generator[Step, None, None]:
        return self._loader.batches(epoch, start_step, num_steps=self._steps)

    def samples_of(self, shards: Sequence[int], first_step: int, steps: int) -> int | None:
        return None

    def items_of(self, epoch: int, step: int, shards: Sequence[int]) -> list[Any]:
        return []  # only the user's own loader knows

    def close(self) -> None:
        self._loader.close()

    def agree(self, group: Group, epoch: int) -> None:
        """Collective: every rank of `group`; one small exchange."""
        lengths = group.exchange(self._loader.steps_per_epoch)
        if None in lengths:
            raise NotShardableError(
                "with add_dist_sampler=False the workers must know how many batches they have",
                where=f"rank {lengths.index(None)}",
                got="a loader without a length",
                fix="give the loader (or its dataset) a __len__",
            )
        if 0 in lengths and any(lengths):
            raise DataOrderError(
                "a worker's own loader is empty, so that it has no batch to keep step with",
                where=f"rank {lengths.index(0)}",
                got=f"batches by rank: {lengths}",
                fix="give every worker at least one batch, or leave add_dist_sampler at True",
            )
        self._steps = max(lengths)


def open_source(operator: TrainingOperator, loader: Any, purpose: str) -> StepSource:
    """Cut `loader` the way `operator`'s loop for `purpose` ("train", "validation") wants it."""
    options, placement = operator._lockstep.context.options, operator._lockstep.context.placement
    if not options.add_dist_sampler:
        return UnshardedSource(UserShardedLoader(loader, placement))
    training = purpose == "train"
    own_loop = operator._overrides("train_epoch" if training else "validate")
    joint = wants_joint(operator, purpose)
    # A borrowed batch keeps a worker in step with its peers' collectives. A user's own
    # validation loop would count it, and has collectives only with a joint loss.
    borrow = training or operator.joint_loss or not own_loop
    # Every part is seeded before it is computed on, so nobody reads what loading leaves.
    return ShardedLoader(loader, placement, joint=joint, borrow=borrow, keeps_generators=False)


def wants_joint(operator: TrainingOperator, purpose: str) -> bool:
    """Whether `operator`'s loop takes all the samples of its worker as one batch."""
    training = purpose == "train"
    own_loop = operator._overrides("train_epoch" if training else "validate")
    own_batch = operator._overrides("train_batch" if training else "validate_batch")
    options = operator._lockstep.context.options
    takes_whole = options.sync in (ONE_PROCESS, "data_parallel")
    return own_loop or own_batch or operator.joint_loss or takes_whole or not options.wrap_ddp
