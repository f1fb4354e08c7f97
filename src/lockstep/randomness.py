# SPDX-License-Identifier: Apache-2.0
"""Random numbers as functions of the place in the run, never of the process that runs there.

Every draw in a run comes from a generator seeded by (seed, epoch, step, shard, purpose).
Nothing is carried over from one step to the next, so a step can be computed by another
worker, replayed after a failure, or reached by a resumed run, and draws the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep._torch_compat import may_seed_cuda

if TYPE_CHECKING:
    from collections.abc import Iterator


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part and on their order.

    A cryptographic hash, because sums and products of small integers collide:
    (epoch 1, step 2) must not draw what (epoch 2, step 1) draws.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed torch (CPU, and CUDA where it is built in), numpy's global state and `random`."""
    torch.default_generator.manual_seed(seed)
    # A forked loader worker must not touch CUDA; elsewhere the call is queued until CUDA starts.
    if may_seed_cuda():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@dataclass(frozen=True)
class RandomState:
    """The state of every global random generator, captured to be restored later."""

    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    numpy: Any
    python: Any

    @classmethod
    def capture(cls) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    @classmethod
    def capture_host(cls) -> RandomState:
        """Of the generators on the host alone, for a process without this one's devices."""
        return cls(torch.get_rng_state(), [], np.random.get_state(), random.getstate())

    def has_torch_state_of(self, other: RandomState) -> bool:
        """Whether nothing was drawn from torch's generators between the two captures.

        The generators of numpy and Python do not count: a thread that prepares data may draw.
        """
        mine, theirs = [self.cpu, *self.cuda], [other.cpu, *other.cuda]
        return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@contextmanager
def preserve_rng_state(seed: int | None = None) -> Iterator[None]:
    """Leave the global generators as they were; inside, start from `seed` if one is given."""
    before = RandomState.capture()
    try:
        if seed is not None:
            seed_all(seed)
        yield
    finally:
        before.restore()
