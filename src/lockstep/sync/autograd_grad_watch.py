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
So a rank does not compare with its peers before the step where values that all ranks share explain
a change: the reduced gradient and the weight, each times a number (a weight decay by hand). The
rank asks, in its next round, to compare the weights; all ranks hear of it, and do in the round
after that. Any other change may be of what ``torch.autograd.grad`` has returned: the rank compares
at once, for a program that uses it on one rank uses it on the others, too.
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

    Attributes:
        asks: for a comparison: the next round tells the ranks, or the one after a refused one.
    """

    def __init__(self, slots: Sequence[Slot], *, can_wait: bool) -> None:
        self._slots = slots
        self._can_wait = can_wait
        self._last: _Moment | None = None
        self._before: dict[Slot, _Before] = {}
        self.asks = False

    def note(self, place: str, rounds: int, steps: int) -> None:
        """Note that ``torch.autograd.grad`` computes gradients now.

        Args:
            place: this rank, for the error.
            rounds: number of reductions so far.
            steps: number of optimizers' steps so far.

        Raises:
            GradientNotReducedError: weights were changed since the last time, and nothing was
                reduced.
        """
        now = _Moment(rounds, steps, _marks_of(self._slots))
        last, self._last = self._last, now
        if last is not None and last[:2] == now[:2] and last.weights != now.weights:
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
        """Before an optimizer of `slots` steps: whether the program may have changed weights or
        gradients by what ``torch.autograd.grad`` returned. After other changes the next round asks.

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
        return self._holds_own(changes)

    def _holds_own(self, changes: Sequence[_Change]) -> bool:
        """Whether one of `changes` is explained by nothing; the next round asks about others."""
        if not changes:
            return False
        holds_own = not (self._can_wait and _are_explained(changes))
        self.asks |= not holds_own
        return holds_own


class _Change(NamedTuple):
    """Some elements by which a program has changed a weight or a gradient.

    Attributes:
        values: of the change, float64; shape (n,).
        shared: the gradient and the weight from before; shape (n, 2).
        rounding: how far `values` may be off, because the sum is rounded; shape (n,).
        eps: of the dtype in which the program computes.
    """

    values: torch.Tensor
    shared: torch.Tensor
    rounding: torch.Tensor
    eps: float

    def is_explained_by(self, factors: torch.Tensor) -> bool:
        """Whether the change is the shared values times these two `factors`."""
        found = self.shared * factors
        error = self.rounding + self.eps * found.abs().sum(1)
        return bool(((self.values - found.sum(1)).abs() <= 8 * error).all())

    def best_factors(self) -> torch.Tensor:
        """Of the shared values, by least squares; both 0 where no element has changed."""
        size = torch.linalg.vector_norm(self.shared, dim=0)
        scale = torch.where(size > 0, size, 1.0)
        found = torch.linalg.lstsq(self.shared / scale, self.values[:, None], driver="gelsd")
        factors: torch.Tensor = found.solution[:, 0] / scale
        return factors


def _are_explained(changes: Sequence[_Change]) -> bool:
    """Whether each change is the shared values times two factors, in every element that is kept.

    Two numbers are always explained by two factors: they have to have those of a larger change, or
    one of these.
    """
    large = [each for each in changes if each.values.count_nonzero() > _SAMPLED // 2]
    factors = [each.best_factors() for each in large]
    if not all(map(_Change.is_explained_by, large, factors)):
        return False
    one_of_two = torch.eye(2, dtype=torch.float64, device="cpu")
    alone = [pair * which for pair in factors for which in one_of_two]
    small = [each for each in changes if each.values.count_nonzero() <= _SAMPLED // 2]
    return all(any(map(each.is_explained_by, [*factors, *alone])) for each in small)


def _change(
    slot: Slot, before: torch.Tensor, now: torch.Tensor, shared: Sequence[torch.Tensor]
) -> _Change:
    eps = torch.finfo(slot.param.dtype).eps
    rounding = eps * torch.maximum(before.abs(), now.abs())
    return _Change(now - before, torch.stack(list(shared), dim=1), rounding, eps)


def _weight_change(slot: Slot, before: _Mark, now: _Mark) -> _Change:
    was = before.numbers(slot.param)
    return _change(slot, was, now.numbers(slot.param), (_gradient_elements(slot, was), was))


def _gradient_elements(slot: Slot, like: torch.Tensor) -> torch.Tensor:
    """The elements of the gradient that stand beside those of the weight; 0 without one."""
    grad = slot.param.grad
    if grad is None or not (grad.layout is torch.strided or is_shard(grad)):
        return torch.zeros_like(like)
    return _some_elements(grad).double().cpu()


def _gradient_changes(slot: Slot, before: _Before) -> list[_Change]:
    """What a program has added to a parameter's gradient."""
    grad = slot.param.grad
    if grad is None or grad.layout is not torch.strided:
        return []
    if before.sample is not None and not _has_changed_gradients([(slot, before)]):
        return []
    now = _some_elements(grad).double().cpu()
    was = torch.zeros_like(now) if before.sample is None else before.sample[: len(now)]
    return [_change(slot, was, now, (was, before.weight.numbers(slot.param)))]


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
