# SPDX-License-Identifier: Apache-2.0
"""Gradient sync for a model of one's own, under torchrun or any other launcher."""

from __future__ import annotations

from typing import Any

from lockstep.group import Group, resolve_group
from lockstep.sync.gradient_sync import GradientSync
from lockstep.sync.synced_tensors import as_modules


def replicate(
    model: Any,
    *,
    group: Any = None,
    bucket_cap_mb: float = 25,
    broadcast: bool = True,
    buffers: str = "after_backward",
) -> GradientSync:
    """Synchronise the gradients of a model on every rank. The model is not wrapped.

    Args:
        model: a module, or a sequence of modules that are trained together (several models, a
            criterion with parameters). Modules that one backward goes through belong in one call.
        group: a `Group`, a process group, or None for the world group (a rank alone, where
            none is initialised).
        bucket_cap_mb: the most that travels in one all-reduce, in MiB.
        broadcast: start from rank 0's parameters and buffers. False: the ranks' values are
            left as they are; structures are compared all the same.
        buffers: "after_backward": rank 0's buffers are broadcast after each synchronised
            backward; "manual": when `GradientSync.broadcast_buffers` is called.

    Returns:
        What to call ``backward``, ``no_sync``, ``detach`` on. It need not be kept: the hooks
        on the parameters hold it.

    Gradient:
        After each backward outside ``no_sync``: the mean over ranks, or by weights.

    Collective:
        Every rank. Blocks. Two small all-gathers, then broadcasts.

    Raises:
        ReplicasDifferError: the ranks' models differ; raised on all before any payload moves.
        WrongTypeError: not a module, or one with parameters that belong to DDP, FSDP, DTensor.
        ConfigurationError: a parameter is synchronised already.
        PeerLostError: another rank went away.
    """
    return GradientSync(
        as_modules(model),
        resolve_group(group),
        bucket_cap_mb=bucket_cap_mb,
        broadcast=broadcast,
        buffers=buffers,
        owns_group=not isinstance(group, Group),
    )
