# SPDX-License-Identifier: Apache-2.0
"""`Shadow`: now and then a second worker computes a shard again, and the bits are compared.

Under ``reproducible=True`` the gradient of a shard is a function of weights, buffers, random
numbers and samples alone. So where two workers compute it with equal hardware, kernels and numbers
of threads, and the bits differ, one of the two has computed wrong numbers without an error.

In a step that is due, the worker that has the shard (the *owner*) sends its samples to another one
(the *checker*), which computes the shard after its own ones. Nothing is reduced before the bits
were compared. Where they differ, a third worker computes the shard too, or without a third one both
do once more: right are the bits that two workers have computed. If the owner's are not, the step
goes on with the others'.

Rejected: the same worker computes a shard twice. A processor that is always wrong passes.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lockstep.content_digest import content_digest
from lockstep.data import shards_of
from lockstep.error_texts import GO_ON, first_of
from lockstep.errors import NotAvailableError, SilentDataCorruptionError
from lockstep.hardware import describe_hardware
from lockstep.operator.object_transfer import transfer
from lockstep.sync import named_local_tensors
from lockstep.tensor_tree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from lockstep.group import Group
    from lockstep.operator.rank_context import RankContext
    from lockstep.operator.shard_batch import ShardBatch
    from lockstep.sync import GradientSync
    from lockstep.sync.ordered_reducer import ShardGradient

_log = logging.getLogger("lockstep.shadow")


def refuse_local_tensors(modules: Iterable[nn.Module]) -> None:
    """Refuse to compare bits where each worker computes a shard with tensors of its own.

    Raises:
        NotAvailableError: names them; on every rank, which have marked the same.
    """
    names = [name for module in modules for name, _ in named_local_tensors(module)]
    if not names:
        return
    raise NotAvailableError(
        "shadow_every cannot compare shards of a model that lockstep.local leaves to each worker",
        expected="weights and buffers that are equal on all workers",
        got=first_of([f"`{name}`" for name in names], 5),
        cause="a second worker computes the shard with its own values of these, and so other bits,"
        " on hardware that does not err",
        fix="leave shadow_every out",
    )


@dataclass(frozen=True)
class ShardComputation:
    """What a worker has computed from a shard.

    Attributes:
        metrics: of the shard, its loss among them.
        weight: of the loss.
        gradient: packed, not yet added to that of other shards.
        buffers: after the forward; None of a shard whose buffers no step commits.
    """

    metrics: Mapping[str, Any]
    weight: float
    gradient: ShardGradient
    buffers: Sequence[torch.Tensor | None] | None

    def digests(self, sync: GradientSync) -> dict[str, str]:
        """For each part, by name, what any other bit in it changes."""
        weights = [self.weight, self.gradient.weight]
        digests = {"the loss": content_digest([self.metrics["train_loss"], *weights])}
        for name, bits in sync.bits_of(self.gradient).items():
            digests[f"the gradient of {name}"] = f"{bits & (1 << 64) - 1:016x}"
        for number, buffer in enumerate(self.buffers or ()):
            digests[f"buffer {number}"] = content_digest(buffer)
        return digests


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker computes."""

    rank: int
    process: int
    host: str
    device: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process})"


@dataclass(frozen=True)
class ShadowCheck:
    """A shard that two workers have computed.

    Attributes:
        step: the global batch, from 1 over the whole run.
        shard: its number.
        wrong: the workers that may have been wrong: one, or two that cannot be told apart; none
            where the bits were equal.
        tensor: the first tensor that differs.
    """

    step: int
    shard: int
    wrong: tuple[WorkerPlace, ...] = ()
    tensor: str = ""

    def __str__(self) -> str:
        which = self.as_dict()
        told = (
            "computed other bits than two other computations, which agree"
            if len(self.wrong) == 1
            else "computed different bits, and which of the two are right cannot be told"
        )
        return (
            f"step {self.step}, shard {self.shard}: {which['worker']} on {which['host']},"
            f" {which['device']}, {told}: {self.tensor}"
        )

    def as_dict(self) -> dict[str, Any]:
        """A line of ``trainer.status()["shadow"]["wrong"]``."""
        return {
            "step": self.step,
            "shard": self.shard,
            "worker": " or ".join(str(place) for place in self.wrong),
            "host": " or ".join(dict.fromkeys(place.host for place in self.wrong)),
            "device": " or ".join(dict.fromkeys(place.device for place in self.wrong)),
            "tensor": self.tensor,
        }


@dataclass(frozen=True)
class _Roles:
    """The ranks that compute a shard: its owner, a checker, and a third one if there is one."""

    owner: int
    checker: int
    third: int | None

    @property
    def deciding(self) -> tuple[int, ...]:
        """The ranks that compute the shard after the owner's and the checker's bits differ."""
        return (self.owner, self.checker) if self.third is None else (self.third,)


class Shadow:
    """The comparisons of one worker with others.

    Args:
        every: in each so many-th step there is one.
        limit: so many wrong shards of one worker are too many.

    Attributes:
        checks: the shards that were compared in this call, and in earlier ones that failed.
        places: where the ranks of this generation compute.
        num_wrong: how often this process, and no other, was found to be wrong.
        num_undecided: how often it could not be decided who was wrong, as far as this rank knows.
    """

    def __init__(self, every: int, limit: int) -> None:
        self._every = every
        self._limit = limit
        self.checks: list[ShadowCheck] = []
        self._is_reported = False
        self.num_wrong = 0
        self.num_undecided = 0
        self._group: Group | None = None
        self.places: list[WorkerPlace] = []
        self._hardware: list[dict[str, Any]] = []

    def begin_call(self) -> None:
        """Forget what earlier calls have reported; a call that has failed reported nothing."""
        if self._is_reported:
            self.checks = []
        self._is_reported = False

    def report(self) -> list[ShadowCheck]:
        """The checks, at the end of a call."""
        self._is_reported = True
        return self.checks

    def compare_hardware(self, context: RankContext) -> None:
        """At the start: refuse a run in which some worker has no equal.

        Collective:
            Every rank: one exchange.

        Raises:
            NotAvailableError: on every rank.
        """
        self._meet(context)
        alone = [rank for rank in range(context.world_size) if not self._equals_of(rank)]
        if alone:
            raise NotAvailableError(
                "shadow_every compares bits, which other hardware may round in another way",
                where=f"rank {alone[0]}, {self.places[alone[0]].host}",
                expected="for each worker another one with equal hardware, kernels and threads",
                got=f"{self._hardware[alone[0]]}",
                fix="start workers on equal machines, or leave shadow_every out",
            )

    def _meet(self, context: RankContext) -> None:
        """Once in each generation: learn where the ranks compute, and with what."""
        if self._group is context.group:
            return
        device = str(context.device)
        hardware = {
            **describe_hardware(device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        place = [context.world_rank, os.getpid(), socket.gethostname(), device]
        met = context.group.exchange([place, hardware])
        self.places = [WorkerPlace(*place) for place, _ in met]
        self._hardware = [each for _, each in met]
        self._group = context.group

    def _equals_of(self, rank: int) -> list[int]:
        """The other ranks whose bits can be compared with those of `rank`."""
        mine = self._hardware[rank]
        return [each for each, other in enumerate(self._hardware) if each != rank and other == mine]

    def begin_step(
        self, context: RankContext, committed: int, shards: Sequence[ShardBatch]
    ) -> ShadowedStep | None:
        """If the next step is due: send the samples of a shard to the rank that computes it too.

        Args:
            committed: global batches since the run began.
            shards: this rank's.

        Returns:
            None where nothing is compared.

        Gradient:
            None.

        Collective:
            Every rank, in a step that is due: see `transfer`; in a new generation one exchange.

        Raises:
            NotPicklableError: the samples cannot be sent.
        """
        number, rest = divmod(committed + 1, self._every)
        if rest or context.world_size == 1:
            return None
        self._meet(context)
        num_shards = context.shard_assignment.num_shards
        round_, shard = divmod(number - 1, num_shards)
        size = context.world_size
        owner = next(rank for rank in range(size) if shard in shards_of(rank, size, num_shards))
        equals = self._equals_of(owner)
        if not equals:
            return None
        # In turn: a worker that is wrong only now and then does not meet the same checker always.
        checker, third = (equals[(round_ + n) % len(equals)] for n in (0, 1))
        roles = _Roles(owner, checker, third if len(equals) > 1 else None)
        # A copy, and before the owner computes: a program may write into its batch.
        mine = next((each for each in shards if each.shard == shard), None)
        sent = transfer(context.group, mine, source=owner, destination=checker)
        return ShadowedStep(self, context, committed + 1, shard, roles, sent)

    def note(self, check: ShadowCheck, rank: int, num_undecided: int) -> None:
        """Note a comparison in which bits differed.

        Args:
            rank: this one.
            num_undecided: how often it could not be decided before who was wrong.

        Raises:
            SilentDataCorruptionError: on every rank, if two workers that cannot be told apart have
                differed too often.
        """
        self.checks.append(check)
        is_decided = len(check.wrong) == 1
        self.num_wrong += is_decided and check.wrong[0].rank == rank
        self.num_undecided = num_undecided + (not is_decided)
        ranks = {place.rank for place in check.wrong}
        innocent = next((each for each in range(len(self.places)) if each not in ranks), 0)
        if rank == innocent:
            _log.warning("[%s] %s; %s", SilentDataCorruptionError.code, check, self._outlook(check))
        if self.num_undecided >= self._limit:
            raise SilentDataCorruptionError(
                "two workers keep computing different bits from the same weights and samples",
                where=f"step {check.step}, shard {check.shard}",
                expected="equal bits: under reproducible=True a shard's gradient depends on nothing"
                " else",
                got=f"{check}; {self.num_undecided} times so far",
                cause="one of the processors computes wrong numbers; or compute_loss depends on"
                " what only one worker has (a counter, a clock, a file)",
                fix="num_workers=3, so that a third one decides; or take both machines out,"
                f" and {GO_ON}",
            )

    def _outlook(self, check: ShadowCheck) -> str:
        """What follows from a comparison in which bits differed, for whoever reads the log."""
        if len(check.wrong) == 1:
            return f"the step goes on with theirs; {self._limit} such shards, and it is replaced"
        return (
            f"the step goes on with those of {check.wrong[0]}; {self._limit} such shards, and the"
            " run ends"
        )


class ShadowedStep:
    """A step in which a shard is computed by two workers.

    Args:
        sent: on the checker, the shard's samples; None elsewhere, and for a shard without samples.

    Attributes:
        shard: its number.
        computed: what this rank, as the owner, has computed.
    """

    def __init__(
        self,
        shadow: Shadow,
        context: RankContext,
        step: int,
        shard: int,
        roles: _Roles,
        sent: ShardBatch | None,
    ) -> None:
        self._shadow = shadow
        self._context = context
        self._step = step
        self.shard = shard
        self._roles = roles
        self._sent = sent
        self.computed: ShardComputation | None = None

    def compare(
        self, sync: GradientSync, compute: Callable[[ShardBatch], ShardComputation]
    ) -> ShardComputation | None:
        """Compare the owner's bits with the checker's.

        Args:
            compute: computes a shard, and leaves nothing behind.

        Returns:
            On the owner what its step goes on with; None elsewhere.

        Collective:
            Every rank: one exchange; where the bits differ, the transfers of the samples and of
            what was computed from them, and two exchanges.

        Raises:
            SilentDataCorruptionError: see `Shadow.note`.
        """
        group, rank, roles = self._context.group, self._context.group.rank, self._roles
        mine = self.computed
        if self._sent is not None:
            # A copy: a program may write into its batch, which may be needed once more.
            mine = compute(copy.deepcopy(self._sent))
        digests = {} if mine is None else mine.digests(sync)
        first = group.exchange(content_digest(digests) if mine is not None else None)
        if first[roles.owner] is None:
            return None  # a short batch, in which the shard has no samples
        if first[roles.owner] == first[roles.checker]:
            self._shadow.checks.append(ShadowCheck(self._step, self.shard))
            return self.computed
        again = self._compute_again(compute)
        second, num_undecided = self._exchange_second(again, sync)
        right = right_bits(first, second)
        tensor = self._differing_tensor(digests)
        wrong = [each for each in (roles.owner, roles.checker) if first[each] != right]
        places = tuple(self._shadow.places[each] for each in wrong)
        check = ShadowCheck(self._step, self.shard, places, tensor)
        self._shadow.note(check, rank, num_undecided)
        if right is None or roles.owner not in wrong:
            return self.computed
        if second[roles.owner] == right:
            return again if rank == roles.owner else None
        sent = transfer(group, mine, source=roles.checker, destination=roles.owner)
        return None if sent is None else _moved_to(sent, self._context.device)

    def _exchange_second(
        self, again: ShardComputation | None, sync: GradientSync
    ) -> tuple[list[str | None], int]:
        """The digests of what ranks have computed after the bits had differed.

        Returns:
            By rank, None from those that have not; and how often it could not be decided before:
            a rank that has joined later does not know.
        """
        digest = None if again is None else content_digest(again.digests(sync))
        told = self._context.group.exchange([digest, self._shadow.num_undecided])
        return [each for each, _ in told], max(number for _, number in told)

    def _compute_again(
        self, compute: Callable[[ShardBatch], ShardComputation]
    ) -> ShardComputation | None:
        again: ShardComputation | None = None
        for each in self._roles.deciding:
            sent = transfer(
                self._context.group, self._sent, source=self._roles.checker, destination=each
            )
            if sent is not None:
                again = compute(sent)
        return again

    def _differing_tensor(self, digests: Mapping[str, str]) -> str:
        """The first tensor in which owner and checker differ, and how many more there are."""
        all_digests = self._context.group.exchange(dict(digests))
        ours, theirs = (all_digests[each] for each in (self._roles.owner, self._roles.checker))
        names = [name for name in ours if ours[name] != theirs.get(name)]
        return first_of(names, 1) or "nothing"


def right_bits(first: Sequence[str | None], second: Sequence[str | None]) -> str | None:
    """The digest that two workers have computed; None if there is none, or more than one."""
    ranks: Counter[str] = Counter()
    for one, other in zip(first, second, strict=True):
        ranks.update({each for each in (one, other) if each is not None})
    agreed = [digest for digest, number in ranks.items() if number > 1]
    return agreed[0] if len(agreed) == 1 else None


def _moved_to(computed: ShardComputation, device: torch.device) -> ShardComputation:
    """`computed` by another worker, for the device of this one."""

    def moved(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return replace(computed, metrics=tree_map(moved, dict(computed.metrics)))
