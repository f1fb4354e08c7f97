# SPDX-License-Identifier: Apache-2.0
"""Says what torch's "got mixed torch.Tensor and DTensor" means for a model in shards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from lockstep.errors import LockstepError, NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.operator.loop_protocols import Operator

_OF_TORCH: Final = "got mixed torch.Tensor and DTensor"


@contextmanager
def explain_mixed_tensors(operator: Operator) -> Iterator[None]:
    """Enter around the user's code: that error of torch's becomes one that names the ways out.

    Raises:
        NotAvailableError: a weight in shards met a whole tensor.
    """
    try:
        yield
    except RuntimeError as error:
        run = operator._lockstep.registered
        is_in_shards = run is not None and run.sync is not None and bool(run.sync.units)
        if isinstance(error, LockstepError) or _OF_TORCH not in str(error) or not is_in_shards:
            raise
        raise NotAvailableError(
            "a weight in shards met a whole tensor",
            where=type(operator).__name__,
            got=f"torch: {' '.join(str(error).split())[:200]}",
            cause="outside of its unit's forward a weight is in shards: in a method of the model,"
            " in a layer of the root that is called by itself, in a target network that"
            " was made by deepcopy, or while loading a state",
            fix="call the model; name the layer's class in register(shard=[...]), so that it is a"
            " unit; register the target network, too; load weights before register",
        ) from error
