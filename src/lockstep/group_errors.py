# SPDX-License-Identifier: Apache-2.0
"""The errors of a `Group`'s collectives, and of a step that may not use what they have brought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.error_texts import first_line
from lockstep.errors import ConfigurationError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def peer_lost_error(what: str, where: str, error: RuntimeError) -> PeerLostError:
    """What a failure inside a collective of the backend's becomes."""
    return PeerLostError(
        f"{what} failed",
        where=where,
        got=first_line(error),
        cause="another rank died, raised, closed its group, or did not come within the timeout",
        fix="look for the first failure among the other ranks",
    )


def missing_ranks_error(
    missing: Sequence[int], before: str, awaited: str, where: str, error: RuntimeError
) -> PeerLostError:
    """What `Group.monitored_all_gather` raises for the ranks that sent nothing.

    Args:
        before: the call that they left out: a backward, or a step.
        awaited: the same call in more words.
    """
    return PeerLostError(
        f"rank {', '.join(map(str, missing))} did not come to {awaited}"
        if missing
        else "the ranks did not all hear from each other",
        where=where,
        expected=f"the same {before} on every rank",
        got=first_line(error),
        cause=f"it left the {before} out (a NaN guard, an early `continue`), raised, or died",
        fix=f"run the {before} on every rank, or agree to leave it out on all of them",
    )


def closed_error(what: str, where: str) -> PeerLostError:
    """The error for `what` on a group that was closed."""
    return PeerLostError(
        f"{what} on a group that was closed",
        where=where,
        cause="the group was left after a failure or at shutdown",
        fix="form a new group and attach to it",
    )


def given_up_error(what: str, where: str) -> PeerLostError:
    """The error for `what`, a collective or a step, over a group that was given up."""
    return PeerLostError(
        f"{what} over a group that was given up",
        where=where,
        cause="another rank was lost, or left the call that runs",
        fix="look for the first failure among the other ranks",
    )


def step_after_failure_error(where: str) -> PeerLostError:
    """The error for a step although a collective has failed, which the loop seems to ignore."""
    return PeerLostError(
        "a step over a group in which a collective has failed",
        where=where,
        cause="another rank was lost, and the loop has caught the error of the collective",
        fix="catch less than RuntimeError: torch.OutOfMemoryError, for example",
    )


def no_backend_error(what: str, where: str, device: torch.device) -> ConfigurationError:
    """The error for a collective of a tensor that the process group's backends do not send."""
    return ConfigurationError(
        f"{what} of a tensor on {device.type}, for which the process group has no backend",
        where=where,
        cause="the model or a batch is on another device than the process group was made for",
        fix="move the model first: model.to(device); or make a group for both:"
        " init_process_group('cpu:gloo,cuda:nccl')",
    )
