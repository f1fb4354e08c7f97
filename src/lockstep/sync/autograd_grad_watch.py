# SPDX-License-Identifier: Apache-2.0
"""Detects that a gradient from `torch.autograd.grad`, which no round reduced, got into a weight or
a ``parameter.grad``.

Such gradients belong to this rank alone: no round reduces them. Lockstep cannot see a program use
them, but it sees the traces: weights that have changed although no gradient was reduced and no
optimizer stepped (an update by hand), or reduced gradients that have changed otherwise than by a
factor or a limit.

Some elements of each weight tell of writes through ``weight.data``, which no version counts. Some
elements of each gradient tell clipping from additions. The other ranks are not asked: a rank
that computes gradients for its log alone must not wait for peers.
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

    Args:
        slots: the parameters.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._last: _Moment | None = None
        self._before: dict[Slot, _Before] = {}

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

    def has_suspicious_changes(self, slots: Sequence[Slot], held: HeldIds) -> bool:
        """Before an optimizer of `slots` steps: whether the program changed weights or gradients.

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
        are_weights_changed = any(marks[s] != before.weight for s, before in self._before.items())
        found = [(slot, self._before.pop(slot)) for slot in slots if slot in self._before]
        ids = held()
        self._before = {
            slot: before._replace(weight=marks[slot])
            for slot, before in self._before.items()
            if id(slot.param) in ids or slot.param.grad is not None
        }
        if are_weights_changed:
            return True
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
