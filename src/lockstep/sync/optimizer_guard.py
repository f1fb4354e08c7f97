# SPDX-License-Identifier: Apache-2.0
"""Refuses an optimizer's step that would use a gradient which passed no reduction.

One hook on all optimizers (torch's global step pre-hook), installed with the first `GradientSync`
and removed when one is detached and none is left. A sync that is only collected leaves the hook:
torch may be iterating over its hooks when the garbage collector runs. The hook sees cases that no
wrapper can: a gradient assigned by hand after ``autograd.grad``, an open window of ``no_sync``
backwards, a parameter outside of every `GradientSync`. A program may change gradients *after* their
reduction, if all ranks do the same: the ranks compare that after ``torch.autograd.grad`` (see
`autograd_grad_watch`), where some parameters are each rank's own, and where a gradient was filled
in for a parameter that no rank had used.

Fast path: one comparison per GradientSync. Only when the last round did not reduce everything are
parameters looked at one by one.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.compiler_disable import disable_dynamo
from lockstep.error_texts import first_of
from lockstep.errors import ConfigurationError, GradientNotReducedError, UnknownParameterError
from lockstep.sync.local_parameters import is_local
from lockstep.sync.optimizer_inspection import (
    given_closure,
    is_step_running,
    optimizer_parameters,
    with_closure,
)
from lockstep.sync.tensor_bits import sum_of_bits
from lockstep.tensor_copies import is_shard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from lockstep.sync.buckets import Slot
    from lockstep.sync.reduction_rounds import ReductionRounds

_log = logging.getLogger("lockstep")

_EXACT: Final = 2**52
"""Below it float64 holds every whole number."""


class _Watch:
    """The guard's memory of one optimizer."""

    def __init__(self, optimizer: Optimizer, version: int) -> None:
        self.version = version
        self.held = _parameter_ids(optimizer)
        self.slots: dict[ReductionRounds, list[Slot]] = {}
        self.unknown: list[tuple[str, torch.Tensor]] = []
        self.rounds: weakref.WeakKeyDictionary[ReductionRounds, int] = weakref.WeakKeyDictionary()
        self.steps = 0
        self.number = _registry.numbers.get(optimizer, 1)
        for group_number, group in enumerate(optimizer.param_groups):
            for number, param in enumerate(group["params"]):
                slot = _registry.find(param)
                if slot is not None and slot.owner is not None:
                    self.slots.setdefault(slot.owner, []).append(slot)  # type: ignore[arg-type]
                elif not is_local(param):
                    self.unknown.append((f"param_groups[{group_number}][{number}]", param))
        self.own: list[tuple[str, torch.Tensor]] = []
        if not self.slots and self.unknown:
            # New parameters of synchronised models stay; others may be of this rank alone.
            self.own = [one for one in self.unknown if not _registry.knows_module_of(one[1])]
            self.unknown = [one for one in self.unknown if _registry.knows_module_of(one[1])]

    @property
    def is_done_with_all_rounds(self) -> bool:
        """Whether a step has used every round that there was."""
        return all(each.num_rounds <= self.rounds.get(each, -1) for each in self.slots)


class _Registry:
    """The synchronised parameters of this process, with their owners. Ranks may be threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
        self._owners: weakref.WeakSet[ReductionRounds] = weakref.WeakSet()
        self._hook: RemovableHandle | None = None
        self.version = 0
        self.watches: weakref.WeakKeyDictionary[Optimizer, _Watch] = weakref.WeakKeyDictionary()
        self.numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.warned_of: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.averaged: Any = WeakIdKeyDictionary()

    def is_averaged(self, param: torch.Tensor) -> bool:
        """Whether the gradient of `param` is the one that `average_gradients` has left."""
        known = self.averaged.get(param)
        return known is not None and known() is param.grad

    def find(self, param: torch.Tensor) -> Slot | None:
        slot = self._slots.get(id(param))
        return slot if slot is not None and slot.param is param else None

    def add(self, owner: ReductionRounds) -> None:
        with self._lock:
            for slot in owner.slots:
                self._slots[id(slot.param)] = slot
            self._owners.add(owner)
            self.version += 1
            if self._hook is None:
                # Not traced: under torch.compile'd steps every counter would become a guard.
                self._hook = register_optimizer_step_pre_hook(disable_dynamo(_before_step))

    def remove(self, owner: ReductionRounds) -> None:
        with self._lock:
            for slot in owner.slots:
                if self.find(slot.param) is slot:
                    del self._slots[id(slot.param)]
            self._owners.discard(owner)
            self.version += 1
            if self._hook is not None and not len(self._owners):
                self._hook.remove()
                self._hook = None

    @property
    def has_peers(self) -> bool:
        with self._lock:
            return any(owner.needs_guard for owner in self._owners)

    def held_ids(self) -> set[int]:
        """The ids of the synchronised parameters that optimizers hold which have stepped."""
        with self._lock:
            watches = [*self.watches.values()]
        return {id(s.param) for watch in watches for slots in watch.slots.values() for s in slots}

    def knows_module_of(self, param: torch.Tensor) -> bool:
        with self._lock:
            return any(owner.is_in_modules(param) for owner in self._owners)

    def watch(self, optimizer: Optimizer) -> _Watch:
        known = self.watches.get(optimizer)
        if known and known.version == self.version and known.held == _parameter_ids(optimizer):
            return known
        with self._lock:
            fresh = _Watch(optimizer, self.version)
            if known is not None:
                fresh.rounds, fresh.steps = known.rounds, known.steps
            self.watches[optimizer] = fresh
        return fresh


_registry = _Registry()


def protect(owner: ReductionRounds) -> None:
    """Guard the parameters of `owner` from now on."""
    _registry.add(owner)


def release(owner: ReductionRounds) -> None:
    """Stop guarding the parameters of `owner`."""
    _registry.remove(owner)


def tell_apart(optimizers: Iterable[Optimizer]) -> None:
    """Give each optimizer a number: a round refuses ranks whose steps have other sums of numbers.

    Args:
        optimizers: in the same order on every rank.
    """
    for place, optimizer in enumerate(optimizers):
        # Powers of three: with at most five optimizers, each stepped at most twice, every
        # combination has a sum of its own below 256, the modulus of a round's check. All are odd,
        # so that one lost step always shows.
        _registry.numbers[optimizer] = pow(3, place, 256)


def expect_alone(optimizers: Iterable[Optimizer]) -> None:
    """Warn of none of `optimizers`: they step a copy of the run in one process, on purpose."""
    _registry.warned_of.update(optimizers)


def note_reduced(parameters: Iterable[torch.Tensor]) -> None:
    """Let optimizers use the gradients that `parameters` have now: every rank has the same ones."""
    for parameter in parameters:
        slot = _registry.find(parameter)
        if slot is not None:
            slot.set_reduced(parameter.grad)


def note_averaged(parameters: Iterable[torch.Tensor]) -> None:
    """Let optimizers use the gradients that `average_gradients` has made the same on all ranks."""
    for parameter in parameters:
        if parameter.grad is not None:
            _registry.averaged[parameter] = weakref.ref(parameter.grad)


def is_synchronised(param: torch.Tensor) -> bool:
    """Whether a GradientSync of this process reduces the gradient of `param`."""
    return _registry.find(param) is not None


def refuse_attached(parameters: dict[str, torch.nn.Parameter], fix: str) -> None:
    """Raise if a parameter already belongs to a GradientSync.

    Raises:
        ConfigurationError: names the first such parameter.
    """
    for name, param in parameters.items():
        if _registry.find(param) is not None:
            raise ConfigurationError(
                f"`{name}` is synchronised already",
                cause="a GradientSync is attached to it; its gradient would be reduced twice",
                fix=fix,
            )


def _parameter_ids(optimizer: Optimizer) -> list[int]:
    # Identities and not numbers: `group["params"] = [...]` may exchange one for another.
    return [id(param) for param in optimizer_parameters(optimizer)]


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    watch = _registry.watch(optimizer)
    if not watch.slots:
        _refuse_unknown(watch)
        _warn_of_own(optimizer, watch)
        return None
    if watch.is_done_with_all_rounds and is_step_running((optimizer,)):
        # A subclass's step calls that of its base, which torch may have hooked as well.
        _check_within_step(watch)
        return None
    closure = given_closure(args, kwargs)
    if closure is None:
        _check(watch)
        watch.steps += 1
        return None
    watch.steps += 1

    def evaluate_and_check(*given: Any, **named: Any) -> Any:
        before = {
            owner: (owner.num_rounds, _gradients_of(slots)) for owner, slots in watch.slots.items()
        }
        loss = closure(*given, **named)
        for owner, slots in watch.slots.items():
            rounds, held = before[owner]
            new = any(a is not b for a, b in zip(_gradients_of(slots), held, strict=True))
            if new and owner.num_rounds == rounds:
                # New gradients without a reduction: no earlier round has reduced them.
                watch.rounds[owner] = rounds
        _check(watch)
        # Its line search and its stopping rule follow the loss that the closure returns: ranks
        # with losses of their own would evaluate at different points.
        if isinstance(optimizer, torch.optim.LBFGS):
            value = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
            for owner in watch.slots:
                judge_losses(owner.attached_group().exchange(value), owner.place)
        return loss

    return with_closure(args, kwargs, evaluate_and_check)


def _gradients_of(slots: list[Slot]) -> list[torch.Tensor | None]:
    # The tensors and not their ids: a freed gradient's id is soon another one's.
    return [slot.param.grad for slot in slots]


def _check_within_step(watch: _Watch) -> None:
    """Look at what a step, whose gradients were checked as it began, has computed within itself."""
    for owner, slots in watch.slots.items():
        _refuse_open_window(owner, watch, slots)
        if owner.needs_guard and owner.holds_own_gradients(slots, _registry.held_ids):
            _compare_between_ranks(owner, watch, slots)


def _refuse_open_window(owner: ReductionRounds, watch: _Watch, slots: list[Slot]) -> None:
    if owner.has_open_window and owner.has_no_gradients:
        owner.forget_window()  # zeroed: the program leaves this step out
    if owner.has_open_window:
        held = [slot.name for slot in slots if slot.param.grad is not None]
        raise _not_reduced(
            owner,
            watch,
            held or [slot.name for slot in slots],
            cause="every backward since the last step ran under no_sync, or one failed midway",
            fix="run the last backward of a window outside no_sync, or call reduce_pending()",
        )


def _check(watch: _Watch) -> None:
    for owner, slots in watch.slots.items():
        since = watch.rounds.get(owner, 0)
        _refuse_open_window(owner, watch, slots)
        if not owner.needs_guard:
            continue
        is_filled = owner.last_full_round <= since and _check_each(owner, watch, slots, since)
        # Asked first: it forgets what the slots had before.
        holds_own = owner.holds_own_gradients(slots, _registry.held_ids)
        if is_filled:
            _compare_between_ranks(owner, watch, slots, before="filled step")
        elif holds_own or _may_be_scaled_apart(owner, slots):
            _compare_between_ranks(owner, watch, slots)
        watch.rounds[owner] = owner.num_rounds
        owner.note_step(watch.number)
    _refuse_unknown(watch)


def _may_be_scaled_apart(owner: ReductionRounds, slots: list[Slot]) -> bool:
    """Whether reduced gradients were changed where a norm may count this rank's own parameters.

    `clip_grad_norm_(model.parameters())` then scales them by another number on each rank.
    """
    return owner.local.has_any and any(
        slot.param.grad is not None and not slot.is_untouched for slot in slots
    )


def _warn_of_own(optimizer: Optimizer, watch: _Watch) -> None:
    """Say once that an optimizer steps what is in no synchronised module, and not marked."""
    own = [(name, param) for name, param in watch.own if param.grad is not None]
    names = [name for name, param in own if not _registry.is_averaged(param)]
    if names and _registry.has_peers and optimizer not in _registry.warned_of:
        _registry.warned_of.add(optimizer)  # a watch is made anew when another sync is attached
        _log.warning(
            "%s steps parameters that nobody synchronises, %s: each rank trains its own. Hand their"
            " module over too: replicate([model, other]), in an operator self.register(models=["
            "model, other]); or, if each rank is to have its own, mark it: lockstep.local(module)",
            type(optimizer).__name__,
            ", ".join(names[:4]),
        )


def _refuse_unknown(watch: _Watch) -> None:
    for name, param in watch.unknown:
        if param.grad is not None and not _registry.is_averaged(param):
            is_plain = not isinstance(param, torch.nn.Parameter)
            raise UnknownParameterError(
                f"the optimizer holds {name} with a gradient that nobody synchronises",
                where=next((owner.place for owner in watch.slots), None),
                got=f"a parameter of shape {tuple(param.shape)}",
                cause="it was added or replaced after replicate(), or belongs to another module",
                fix="before the optimizer is made: value = torch.nn.Parameter(value), and"
                " replicate([model, torch.nn.ParameterList([value])])"
                if is_plain
                else "hand its module to replicate() too, or mark it: lockstep.local(parameter)",
            )


def _check_each(owner: ReductionRounds, watch: _Watch, slots: list[Slot], since: int) -> bool:
    """Refuse gradients that no round since then has reduced.

    Returns:
        Whether the program has filled in gradients of parameters that no rank had used (zeros, a
        weight decay, a sum over tasks). All ranks have seen that alike, and have to compare them.
    """
    has_new = any(slot.last_round > since for slot in slots)
    # Reduced gradients may be used twice, but not in the place of those that a rank without
    # samples was to accumulate. Where the program zeroed or changed one, a round compares that.
    held = [slot for slot in slots if slot.param.grad is not None]
    has_old = bool(held) and not owner.has_accumulated and all(s.is_untouched for s in held)
    if not has_new and not has_old and not _has_assigned_gradients(slots):
        # Nothing to reduce here. Peers that have gradients to reduce would wait without this.
        owner.reduce_pending()
        if owner.last_full_round > since:
            return False
    stale = [
        slot
        for slot in slots
        if slot.param.grad is not None and slot.last_round <= since and not slot.is_untouched
    ]
    own = [slot.name for slot in stale if slot.last_unused <= since or is_shard(slot.param)]
    if own:
        cause, fix = owner.transport.stale_advice
        raise _not_reduced(owner, watch, own, cause=cause, fix=fix)
    return bool(stale)


def _has_assigned_gradients(slots: list[Slot]) -> bool:
    return any(slot.param.grad is not None and not slot.holds_reduced for slot in slots)


def _compare_between_ranks(
    owner: ReductionRounds, watch: _Watch, slots: list[Slot], before: str = "step"
) -> None:
    """Compare the gradients of `slots`, and all weights, between the ranks.

    The user may change gradients in the same way on every rank.

    Collective:
        Every rank: one monitored all-gather: each rank decides by itself to take part, and a rank
        that has nothing to compare goes on to another collective.

    Raises:
        GradientNotReducedError: on every rank, with the names of those that differ.
        PeerLostError: a rank did not come.
    """
    weights = [(slot.name, slot.param) for slot in owner.slots]
    compared = [*weights, *((slot.name, slot.param.grad) for slot in slots)]
    bits = [sum_of_bits(tensor) for _, tensor in compared]
    everyone = owner.attached_group().monitored_all_gather(
        [float(number % _EXACT) for number in bits], before
    )
    first = everyone[0]
    places = {place for other in everyone for place, n in enumerate(other) if n != first[place]}
    differ = list(dict.fromkeys(compared[place][0] for place in sorted(places)))
    if differ:
        raise _not_reduced(
            owner,
            watch,
            differ,
            cause="the ranks have changed these weights, or gradients after their reduction, each"
            " in its own way: with a result of torch.autograd.grad, or by a norm that counts local"
            " parameters",
            fix="(loss_a + loss_b).backward(); or clip without the local parameters, as in"
            " clip_grad_norm_([p for n, p in model.named_parameters() if n != 'own.weight'], 1.0)",
        )


def _not_reduced(
    owner: ReductionRounds, watch: _Watch, names: list[str], *, cause: str, fix: str
) -> GradientNotReducedError:
    return GradientNotReducedError(
        "the optimizer is about to use gradients of this rank alone",
        where=f"{owner.place}, step {watch.steps + 1}",
        got=first_of([f"`{name}`" for name in names], 8),
        cause=cause,
        fix=fix,
    )


def judge_losses(losses: list[float], where: str) -> None:
    """Raise on every rank if the ranks' losses are not one."""
    # As strings: a NaN is not equal to a NaN, and the difference of two infinities is NaN.
    if len(set(map(str, losses))) == 1:
        return
    if max(losses) - min(losses) <= 1e-6 * max(map(abs, losses)):
        return
    raise GradientNotReducedError(
        "LBFGS follows the loss that its closure returns, and every rank returned its own",
        where=where,
        expected="the global loss, the same on every rank",
        got=", ".join(f"{loss:.6g} on rank {rank}" for rank, loss in enumerate(losses)),
        cause="a mean of the ranks' means is no global loss: gradients are weighted by samples",
        fix="in the closure loss = lockstep.global_mean(losses), with a loss for each row;"
        " loss.backward(); return loss",
    )
