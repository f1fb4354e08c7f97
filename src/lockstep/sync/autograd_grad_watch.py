# SPDX-License-Identifier: Apache-2.0
"""Detects that a gradient from `torch.autograd.grad`, which no round reduced, got into a weight or
a ``parameter.grad``.

Such gradients belong to this rank alone: no round reduces them. Lockstep cannot see a program use
them, but it sees the traces: weights that have changed although no gradient was reduced and no
optimizer stepped (an update by hand), or reduced gradients that have changed otherwise than by a
factor or a limit.

Some elements of each weight tell of writes through ``weight.data``, which no version counts. Some
elements of each gradient tell clipping from additions.

A rank that computes gradients for its log alone must not wait for peers, which do not know of it.
So a rank compares with its peers before the step only where the change is a multiple of what
``torch.autograd.grad`` has returned: then the program uses that, and its other ranks do, too. Any
other change (a weight decay by hand, or the sign of such a gradient) is as likely one that
all ranks make alike. The rank asks, in its next round, to compare the weights; all ranks
hear of it, and do in the round after that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from lockstep._torch_compat import version_of
from lockstep.errors import GradientNotReducedError
from lockstep.tensor_copies import is_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from lockstep.sync.buckets import Slot

    HeldIds = Callable[[], Collection[int]]

_SAMPLED: Final = 4
"""Elements of each weight that are compared, and of each gradient, beside its norm."""


_KEPT: Final = 4
"""Gradients of each weight that are kept of what ``torch.autograd.grad`` has returned."""


class _Mark(NamedTuple):
    """What changes when a program writes to a weight: its version, or some elements as bytes."""

    version: int
    elements: bytes

    def numbers(self, param: torch.Tensor) -> torch.Tensor:
        """The elements of `param`."""
        if not self.elements:
            return torch.empty(0, dtype=torch.float64, device="cpu")
        dtype = param.dtype.to_real()
        return torch.frombuffer(bytearray(self.elements), dtype=dtype).double()


class _Moment(NamedTuple):
    rounds: int
    steps: int
    weights: list[_Mark]


class _Before(NamedTuple):
    """The state of a parameter after a call of ``torch.autograd.grad``.

    Attributes:
        weight: at the call.
        sample: of the gradient that the last round left; None if there is none.
    """

    weight: _Mark
    sample: torch.Tensor | None


class AutogradGradWatch:
    """Notes calls of ``torch.autograd.grad``, and finds the traces that its gradients leave.

    Of one membership of the group: a step that is made again asks again.

    Args:
        slots: the parameters.
        can_wait: the ranks' weights will tell, if a change is another one on each rank.
    """

    def __init__(self, slots: Sequence[Slot], *, can_wait: bool) -> None:
        self._slots = slots
        self._can_wait = can_wait
        self._last: _Moment | None = None
        self._before: dict[Slot, _Before] = {}
        self._returned: dict[Slot, list[torch.Tensor]] = {}
        self._asks = False

    def note(self, place: str, rounds: int, steps: int) -> None:
        """Note that ``torch.autograd.grad`` computes gradients now.

        Args:
            place: this rank, for the error.
            rounds: number of reductions so far.
            steps: number of optimizers' steps so far.

        Raises:
            GradientNotReducedError: weights were changed by what it returned the last time, and
                nothing was reduced.
        """
        now = _Moment(rounds, steps, _marks_of(self._slots))
        last, self._last = self._last, now
        is_same_step = last is not None and last[:2] == now[:2]
        if last is not None and is_same_step and self._holds_own(self._changes_of(last, now)):
            raise GradientNotReducedError(
                "weights were changed after torch.autograd.grad, and no gradient was reduced",
                where=f"{place}, step {steps + 1}",
                cause="an update by hand from gradients of this rank alone: the ranks' weights"
                " are no longer the same",
                fix="loss.backward() and an optimizer; an inner loop whose weights are restored"
                " afterwards: `with gradients.no_sync():` around it",
            )
        for slot, mark in zip(self._slots, now.weights, strict=True):
            if slot not in self._before:
                self._before[slot] = _Before(mark, _sample_of(slot))

    def note_gradient(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Note what ``torch.autograd.grad`` returns for a parameter."""
        if gradient.layout is torch.strided or is_shard(gradient):
            kept = self._returned.setdefault(slot, [])
            # Not read from the device before a change has to be explained.
            self._returned[slot] = [*kept, _some_elements(gradient).clone()][-_KEPT:]

    def take_question(self) -> bool:
        """Whether to ask for a comparison, in the round that begins; once for each reason."""
        asks, self._asks = self._asks, False
        return asks

    @property
    def is_pending(self) -> bool:
        """Whether an optimizer has not stepped since a call of ``torch.autograd.grad``."""
        return bool(self._before)

    def remember_gradients(self) -> None:
        """After a round: sample the gradients that it has left."""
        for slot in self._before:
            self.remember(slot)

    def remember(self, slot: Slot) -> None:
        """Sample the gradient that a round has left in `slot`."""
        if slot in self._before:
            self._before[slot] = self._before[slot]._replace(sample=_sample_of(slot))

    def holds_own_gradients(self, slots: Sequence[Slot], held: HeldIds) -> bool:
        """Before an optimizer of `slots` steps: whether the program changed weights or gradients
        by what ``torch.autograd.grad`` returned. After other changes the next round asks.

        Gradients that were multiplied by a factor, or cut to a limit, do not count. Weights of
        other optimizers do: the gradients of `slots` were computed with them.

        Args:
            slots: what the optimizer steps.
            held: gives the ids of the parameters of all optimizers that have stepped. What none
                of them holds (a target network) is looked at no longer.
        """
        if not self._before:
            return False
        marks = dict(zip(self._before, _marks_of(self._before), strict=True))
        moved = {s: (b.weight, marks[s]) for s, b in self._before.items() if marks[s] != b.weight}
        found = [(slot, self._before.pop(slot)) for slot in slots if slot in self._before]
        ids = held()
        self._before = {
            slot: before._replace(weight=marks[slot])
            for slot, before in self._before.items()
            if id(slot.param) in ids or slot.param.grad is not None
        }
        changes: list[_Change] = []
        if moved or _has_changed_gradients(found):
            changes += [_weight_change(slot, *pair) for slot, pair in moved.items()]
            changes += [each for pair in found for each in _gradient_changes(*pair)]
        holds_own = self._holds_own(changes)
        self._returned = {s: kept for s, kept in self._returned.items() if s in self._before}
        return holds_own

    def _changes_of(self, last: _Moment, now: _Moment) -> list[_Change]:
        pairs = zip(self._slots, last.weights, now.weights, strict=True)
        return [_weight_change(slot, *pair) for slot, *pair in pairs if pair[0] != pair[1]]

    def _holds_own(self, changes: Sequence[_Change]) -> bool:
        """Whether one of `changes` is of what was returned; the next round asks about others."""
        if not changes:
            return False
        if not self._can_wait:
            return True
        holds_own = any(each.is_multiple_of(self._returned.get(each.slot, ())) for each in changes)
        self._asks |= not holds_own
        return holds_own


class _Change(NamedTuple):
    """Some elements by which a program has changed a weight or a gradient.

    Attributes:
        values: of the change, float64.
        rounding: how large it may be without a change, because the sum is rounded.
    """

    slot: Slot
    values: torch.Tensor
    rounding: torch.Tensor

    def is_multiple_of(self, returned: Sequence[torch.Tensor]) -> bool:
        """Whether the change is one of these gradients, or their sum, times a factor."""
        found = [each.double().cpu() for each in returned]
        sums = [torch.stack(found).sum(dim=0)] if len(found) > 1 else []
        return any(self._is_multiple_of(each) for each in [*found, *sums])

    def _is_multiple_of(self, gradient: torch.Tensor) -> bool:
        telling = (gradient != 0) & (self.values.abs() > 16 * self.rounding)
        if telling.count_nonzero() < 2:
            return False  # one number is always some multiple of another one
        largest = int(torch.where(telling, gradient.abs(), 0.0).argmax())
        scaled = gradient * (self.values[largest] / gradient[largest])
        error = self.rounding + torch.finfo(self.slot.param.dtype).eps * scaled.abs()
        return bool(((self.values - scaled).abs() <= 8 * error).all())


def _change(slot: Slot, before: torch.Tensor, now: torch.Tensor) -> _Change:
    eps = torch.finfo(slot.param.dtype).eps
    return _Change(slot, now - before, eps * torch.maximum(before.abs(), now.abs()))


def _weight_change(slot: Slot, before: _Mark, now: _Mark) -> _Change:
    return _change(slot, before.numbers(slot.param), now.numbers(slot.param))


def _gradient_changes(slot: Slot, before: _Before) -> list[_Change]:
    """What was added to a parameter's gradient, and what took its place."""
    grad = slot.param.grad
    if grad is None or grad.layout is not torch.strided:
        return []
    if before.sample is not None and not _has_changed_gradients([(slot, before)]):
        return []
    now = _some_elements(grad).double().cpu()
    zeros = torch.zeros_like(now)
    was = zeros if before.sample is None else before.sample[: len(now)]
    return [_change(slot, was, now), _change(slot, zeros, now)]


def _has_changed_gradients(found: Sequence[tuple[Slot, _Before]]) -> bool:
    """Whether gradients were changed otherwise than by a factor or a limit."""
    if any(_is_assigned_by_hand(slot) for slot, before in found if before.sample is None):
        return True
    pairs = [
        (before.sample, _sample(grad))
        for slot, before in found
        if before.sample is not None
        and (grad := slot.param.grad) is not None
        and grad.layout is torch.strided
    ]
    kinds = {slot.param.dtype for slot, before in found if before.sample is not None}
    rounding = 8.0 * max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    return not all(_is_clipped(*each, rounding) for each in _group_for_comparison(pairs))


def _group_for_comparison(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each gradient's sample alone, because programs clip module by module.

    A gradient with one nonzero number joins others: one number alone is always some multiple of its
    former value.
    """

    def stack_pairs(
        some: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before, now = zip(*some, strict=True)
        return torch.stack(before), torch.stack(now)

    telling = [pair for pair in pairs if pair[1][:-1].count_nonzero() > 1]
    others = [pair for pair in pairs if pair[1][:-1].count_nonzero() <= 1]
    yield from (stack_pairs([pair]) for pair in telling)
    if others:
        is_one = sum(int(now[:-1].count_nonzero()) for _, now in others) <= 1
        yield stack_pairs([*others, *telling[:1]] if is_one else others)


def _is_clipped(before: torch.Tensor, now: torch.Tensor, rounding: float) -> bool:
    return _is_scaled(before, now, rounding) or _is_limited(before, now)


def _is_assigned_by_hand(slot: Slot) -> bool:
    return slot.param.grad is not None and not slot.holds_reduced


def _is_scaled(before: torch.Tensor, now: torch.Tensor, rounding: float) -> bool:
    """Whether every element was multiplied by one factor, or set to zero."""
    before, now = before.flatten(), now.flatten()
    largest = int((now.abs() > 0).double().mul(before.abs()).argmax())
    # One number alone (and its norm) is always some multiple of its former value.
    if before[largest] == 0 or now.count_nonzero() <= 2:
        return bool((now == before).all())
    scaled = before * (now[largest] / before[largest])
    return bool((torch.isclose(now, scaled, rtol=rounding, atol=0.0) | (now == 0)).all())


def _is_limited(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether every element was kept, or cut to one limit."""
    before, now, was, norm = before[:, :-1], now[:, :-1], before[:, -1], now[:, -1]
    limit = now.abs().max()
    cut = (now.abs() == limit) & (now * before > 0) & (before.abs() > limit)
    return bool(((now == before) | cut).all() and (norm <= was).all())


def _marks_of(slots: Collection[Slot]) -> list[_Mark]:
    """The versions of weights and some of their elements, read from each device at once."""
    elements = [_some_elements(slot.param) for slot in slots]
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for some in elements:
        by_kind.setdefault((some.device, some.dtype), []).append(some)
    read = {
        kind: iter(
            torch.cat(together)
            .cpu()
            .view(torch.uint8)
            .split([len(t) * t.element_size() for t in together])
        )
        for kind, together in by_kind.items()
    }
    return [
        _Mark(version_of(slot.param), next(read[some.device, some.dtype]).numpy().tobytes())
        for slot, some in zip(slots, elements, strict=True)
    ]


def _some_elements(tensor: Any) -> torch.Tensor:
    """At most `_SAMPLED` evenly spread elements as real numbers; of a shard, this rank's rows'."""
    flat = _flat(tensor.to_local() if is_shard(tensor) else tensor)
    return flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All numbers one after the other; a complex one is two."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat


def _sample_of(slot: Slot) -> torch.Tensor | None:
    grad = slot.param.grad
    if grad is None or grad.layout is not torch.strided or not slot.holds_reduced:
        return None
    return _sample(grad)


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """Copies of some elements, as real numbers, and the norm of all: shape (_SAMPLED + 1,).

    The sampled elements alone would miss an addition to the others; zeros are common behind a ReLU.
    """
    found = torch.zeros(_SAMPLED + 1, dtype=torch.float64, device="cpu")
    some = _some_elements(gradient)
    found[: len(some)] = some
    found[-1] = torch.linalg.vector_norm(_flat(gradient), dtype=torch.float64)
    return found
