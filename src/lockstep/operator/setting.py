# SPDX-License-Identifier: Apache-2.0
"""Where an operator finds itself: its rank, its device, and how it was asked to train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lockstep.data import Placement
from lockstep.group import Group

if TYPE_CHECKING:
    from lockstep.operator.precision import PrecisionName


@dataclass(frozen=True)
class Options:
    """How a run was asked to train: the trainer's arguments that every operator follows.

    Attributes:
        scheduler_step_freq: "batch", "epoch", "manual", or None without schedulers.
        wrap_ddp: False leaves synchronisation to the user's own wrapper.
        add_dist_sampler: False lets every worker read its own loader as it is.
        bucket_cap_mb: how large a bucket of gradients grows before it is sent, in MiB.
    """

    precision: PrecisionName = "fp32"
    use_tqdm: bool = False
    scheduler_step_freq: str | None = None
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    bucket_cap_mb: float = 25.0


@dataclass(frozen=True)
class Setting:
    """Everything that a worker tells its operator; only a loaded state puts another in place.

    Attributes:
        placement: the shards of every global batch that this worker carries.
    """

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: Group = field(default_factory=lambda: Group(None))
    placement: Placement = field(default_factory=lambda: Placement(1, range(1), seed=0))
    options: Options = field(default_factory=Options)
