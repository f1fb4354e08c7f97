# SPDX-License-Identifier: Apache-2.0
"""The gradient that each backward brings to a parameter, as autograd delivers it.

A hook on the leaf runs before the gradient is added to ``parameter.grad``, and so before a wrapper
reduces it, before clipping and before the optimizer: one mechanism for plain backwards, wrappers,
compiled modules, checkpoints and ``autograd.grad``. It is put ahead of the program's own hooks, and
is there for one backward. ``fully_shard`` gives autograd another leaf, the whole parameter, in the
place of the piece that the optimizer holds; the hook is put there.

What cannot be had: gradients of ``FullyShardedDataParallel``, whose leaf is a flat tensor of many
parameters, and those that lockstep's own synchronisation gives to hooks after the reduction.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.audit.fingerprint import sampled, sketch, squared_norm
from lockstep.audit.probe.fully_sharded import whole_of_pieces
from lockstep.audit.probe.optimizers import CLOSELY

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from lockstep.audit.facts import Backward
    from lockstep.audit.probe.probe import Probe, Watched


@contextmanager
def recorded(probe: Probe, record: Backward) -> Iterator[None]:
    """Within it, `record` gets the sampled elements of what a backward brings."""
    hooked = _Hooked()
    probe.harmlessly(hooked.hook_in, probe)
    try:
        yield
    finally:
        hooked.remove()
        probe.harmlessly(hooked.write_to, record)


class _Hooked:
    """Hooks on the parameters of the optimizers that are looked at closely, for one backward."""

    def __init__(self) -> None:
        self._put: list[tuple[dict[int, Any], int]] = []
        self._arrived: dict[tuple[str, int], torch.Tensor] = {}
        self._squares: dict[tuple[str, int], torch.Tensor] = {}
        self._watched: list[Watched] = []

    def hook_in(self, probe: Probe) -> None:
        whole = whole_of_pieces(probe)
        for watched in probe.optimizers.values():
            if watched.taken >= CLOSELY:
                continue
            leaves = [whole.get(id(p), p) for p in watched.parameters]
            if all(map(_can_be_hooked, leaves)):
                self._watched.append(watched)
                for place, (leaf, count) in enumerate(zip(leaves, watched.counts, strict=True)):
                    if leaf.requires_grad:
                        self._hook(probe, (watched.track.key, place), leaf, count)

    def _hook(self, probe: Probe, slot: tuple[str, int], leaf: torch.Tensor, count: int) -> None:
        def note(gradient: torch.Tensor) -> None:
            probe.harmlessly(self._add, slot, gradient, count)

        key = leaf.register_hook(note).id
        hooks = leaf._backward_hooks
        assert hooks is not None
        self._put.append((hooks, key))
        # Called in the order in which they were put in, which `move_to_end` does not change.
        theirs = [known for known in hooks if known != key]
        hooks.update({known: hooks.pop(known) for known in theirs})

    def _add(self, slot: tuple[str, int], gradient: torch.Tensor, count: int) -> None:
        squared = squared_norm(gradient)
        # A checkpoint runs a backward in parts; of several the norm is that of orthogonal ones.
        earlier = self._squares.get(slot)
        self._squares[slot] = squared if earlier is None else earlier + squared
        if count:
            arrived = sampled(gradient, count)
            known = self._arrived.get(slot)
            self._arrived[slot] = arrived if known is None else known + arrived

    def remove(self) -> None:
        for hooks, key in self._put:
            hooks.pop(key, None)

    def write_to(self, record: Backward) -> None:
        for watched in self._watched:
            key = watched.track.key
            squares, arrived = (
                {place: values for (held, place), values in of_all.items() if held == key}
                for of_all in (self._squares, self._arrived)
            )
            if squares:
                record.local[key] = sketch(arrived, squares, watched.counts)


def _can_be_hooked(leaf: torch.Tensor) -> bool:
    """A table of another type belongs to a synchronisation that runs hooks after it has reduced."""
    hooks = leaf._backward_hooks
    return leaf.is_leaf and (hooks is None or type(hooks) is OrderedDict)
