# SPDX-License-Identifier: Apache-2.0
"""`write_parts`: every worker writes its part of a checkpoint while training goes on.

A worker writes into the checkpoint's folder where its host has that, on a shared file system or on
the driver's machine. Elsewhere it writes into a file of its own, which the driver fetches a piece
at a time: the driver never holds a part, let alone the whole state.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import RayActorError, RayTaskError

import ray
from lockstep.errors import WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.checkpoint import WrittenPart
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import PartOnDisk

_PIECE: Final = 1 << 25


def write_parts(
    members: Sequence[WorkerHandle], step: int, folder: str
) -> list[WrittenPart] | None:
    """Let each of `members` write its copy of the state at `step` into `folder`.

    Returns:
        What each rank wrote; None if a rank has no copy of that step any more.

    Raises:
        WorkerDiedError: a worker died meanwhile.
        Exception: what a worker raised, a full disk for example.
    """
    try:
        answers = [_ask(member, step, folder) for member in members]
        parts: list[PartOnDisk | None] = [
            each if member.actor is None else ray.get(each)
            for member, each in zip(members, answers, strict=True)
        ]
        written: list[WrittenPart] = []
        for member, part in zip(members, parts, strict=True):
            if part is None:
                return None
            for name, size in (part.sizes or {}).items():
                _fetch(member, name, size, folder)
            written.append(part.part)
        return written
    except RayActorError as error:
        raise WorkerDiedError(
            "a worker died while it wrote its part of a checkpoint",
            where=folder,
            fix="nothing: the run goes on, and the next checkpoint will be whole",
        ) from error
    except RayTaskError as error:
        raise error.cause from error


def _ask(member: WorkerHandle, step: int, folder: str) -> Any:
    if member.worker is not None:
        return member.worker.snapshots.part.write(step, folder)
    assert member.actor is not None, "a worker is in this process or in an actor"
    return member.actor.write_part.remote(step, folder)


def _fetch(member: WorkerHandle, name: str, size: int, folder: str) -> None:
    assert member.actor is not None, "a worker in this process sees the folder"
    with open(os.path.join(folder, name), "wb") as file:
        # The last piece is shorter than asked for, maybe empty: the worker then drops the file.
        for offset in range(0, size + 1, _PIECE):
            file.write(ray.get(member.actor.read_part.remote(name, offset, _PIECE)))
