# SPDX-License-Identifier: Apache-2.0
"""The process group of a call: the user's argument, or the default group."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from lockstep.errors import ConfigurationError, WrongTypeError, WrongUseError


def default_process_group() -> Any | None:
    """The world group; None in a process that was started alone.

    Raises:
        WrongUseError: a launcher started this process as one of several, and there is no group.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    started = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    if started.isdecimal() and int(started) > 1:
        raise WrongUseError(
            "this process is one of several, and they have no process group",
            where=f"rank {os.environ['RANK']}",
            got=f"WORLD_SIZE={started}",
            cause="init_process_group is called later, or never: each rank would train by itself",
            fix="torch.distributed.init_process_group() before this call; for a process that is to"
            " be alone group=lockstep.group.Group(None)",
        )
    return None


def refuse_late_peers() -> None:
    """Refuse to go on alone, where there was no world group and now there is one.

    Raises:
        WrongUseError: the world group has other ranks.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise WrongUseError(
            "this process has peers, and works as if it were alone",
            where=f"rank {dist.get_rank()}",
            got=f"a process group of {dist.get_world_size()} ranks",
            cause="init_process_group came after replicate() or shard_loader(): each rank trains by"
            " itself",
            fix="torch.distributed.init_process_group() before replicate() and shard_loader(); for"
            " a process that is to be alone group=lockstep.group.Group(None)",
        )


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
