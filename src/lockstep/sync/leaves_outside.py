# SPDX-License-Identifier: Apache-2.0
"""`LeavesOutside`: warns of gradients that carry a batch's weight and that no round divides.

A weighted backward multiplies its loss by weight / unit. A round divides what it reduces, and
`LocalGradients` what is local in the synchronised modules. Of other leaves (activations that were
detached and are to get a gradient, modules that were never synchronised) nobody knows, and the unit
changes from the first round to the second. To find them the graph has to be walked, a microsecond
for each of its nodes: so only the first backwards are looked at, and programs are only told.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from lockstep.crossed_gradients import leaves_behind
from lockstep.tensor_copies import is_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_log = logging.getLogger("lockstep")

_BACKWARDS: Final = 3


class LeavesOutside:
    """Looks for leaves outside of the synchronised modules.

    Args:
        inside: all parameters of these modules, those that are local too.
        place: this rank, for the message.
    """

    def __init__(self, inside: Sequence[torch.Tensor], place: str) -> None:
        self._inside = frozenset(map(id, inside))
        self._place = place
        # The leaves of a graph through units are not the shards: they are made for each forward.
        self._left = 0 if any(map(is_shard, inside)) else _BACKWARDS

    def look_at(self, loss: torch.Tensor, scale: float) -> None:
        """Look at the graph of a loss whose backward begins, in the first that are scaled.

        Args:
            scale: weight / unit, by which the loss is multiplied.
        """
        if not self._left or loss.grad_fn is None or scale == 1.0:
            return
        self._left -= 1
        found = [leaf for leaf in leaves_behind(loss.grad_fn) if id(leaf) not in self._inside]
        if found:
            self._left = 0  # said once
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in found[:4])
            _log.warning(
                "%s: a backward with a weight reaches %d tensors outside of the synchronised"
                " modules, of shapes %s. Their gradients are multiplied by weight / unit (%g here),"
                " and nothing divides them. If the program uses these gradients: loss.backward()"
                " without a weight, or hand their module over too, also if it is marked as local:"
                " replicate([model, other]), in an operator self.register(models=[model, other])",
                self._place,
                len(found),
                shapes,
                scale,
            )
