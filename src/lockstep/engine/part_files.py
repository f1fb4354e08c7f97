# SPDX-License-Identifier: Apache-2.0
"""`write_parts`: every worker writes its part of a checkpoint while training goes on.

A worker writes into the checkpoint's folder where its host has that, on a shared file system or on
the driver's machine. Elsewhere it writes into a file of its own, which the driver fetches a piece
at a time: the driver never holds a part, let alone the whole state.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from ray.exceptions import RayTaskError

import ray
from lockstep.engine.ray_errors import ACTOR_DEATHS
from lockstep.engine.watched_wait import wait_for_answers
from lockstep.errors import CheckpointWriteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep.checkpoint import WrittenPart
    from lockstep.engine.worker_handle import WorkerHandle
    from lockstep.worker import PartOnDisk

_PIECE: Final = 1 << 25


def write_parts(
    members: Sequence[WorkerHandle],
    step: int,
    folder: str,
    end_stopped_workers: Callable[[], None],
) -> list[WrittenPart] | None:
    """Let each of `members` write its copy of the state at `step` into `folder`.

    Args:
        end_stopped_workers: see `wait_for_answers`.

    Returns:
        What each rank wrote; None if a rank has no copy of that step any more, or there is none.

    Raises:
        CheckpointWriteError: a worker died meanwhile.
        Exception: what a worker raised, a full disk for example.
    """
    members = list(members)  # a recovery may change it meanwhile
    try:
        asked = [
            None if each.actor is None else each.actor.write_part.remote(step, folder)
            for each in members
        ]
        # A worker in this process writes while the others do.
        here = [
            None if each.worker is None else each.worker.snapshots.part.write(step, folder)
            for each in members
        ]
        # No rank may write any more when an error of another one has removed the folder.
        answers = [each for each in asked if each is not None]
        wait_for_answers(answers, end_stopped_workers)
        parts: list[PartOnDisk | None] = [
            mine if answer is None else ray.get(answer)
            for mine, answer in zip(here, asked, strict=True)
        ]
        written: list[WrittenPart] = []
        for member, part in zip(members, parts, strict=True):
            if part is None:
                return None
            for name, size in (part.sizes or {}).items():
                _fetch(member, name, size, folder, end_stopped_workers)
            written.append(part.part)
        return written or None
    except ACTOR_DEATHS as error:
        raise CheckpointWriteError(
            "a worker died while it wrote its part of a checkpoint",
            where=folder,
            fix="save again; the run goes on without that worker",
        ) from error
    except RayTaskError as error:
        raise error.cause from error


def _fetch(
    member: WorkerHandle,
    name: str,
    size: int,
    folder: str,
    end_stopped_workers: Callable[[], None],
) -> None:
    assert member.actor is not None, "a worker in this process sees the folder"
    with open(os.path.join(folder, name), "wb") as file:
        # The last piece is shorter than asked for, maybe empty: the worker then drops the file.
        for offset in range(0, size + 1, _PIECE):
            piece = member.actor.read_part.remote(name, offset, _PIECE)
            wait_for_answers([piece], end_stopped_workers)
            file.write(ray.get(piece))
