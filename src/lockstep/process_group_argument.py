# SPDX-License-Identifier: Apache-2.0
"""Refuses what a user hands over as a process group, and is none that this rank is in."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lockstep.errors import ConfigurationError, WrongTypeError


def require_process_group(given: Any | None) -> Any | None:
    """`given`, a user's argument, if it is None or a process group that this rank is in.

    Raises:
        ConfigurationError: this rank is not in the group.
        WrongTypeError: something else than a process group.
    """
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(
            "this rank is not in the group that it was given",
            where=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            cause="new_group(ranks) returns no process group on other ranks",
            fix="call it on the ranks of the group only",
        )
    if given is not None and not callable(getattr(given, "rank", None)):
        raise WrongTypeError(
            "this is no process group",
            expected="a process group, a lockstep.group.Group, or None",
            got=type(given).__name__,
            fix='mesh.get_group(), or mesh["name"].get_group() of one axis of several'
            if hasattr(given, "get_group")
            else None,
        )
    return given
