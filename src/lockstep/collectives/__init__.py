# SPDX-License-Identifier: Apache-2.0
"""Gradients through communication: losses over the rows of all ranks."""

from __future__ import annotations

from lockstep.collectives.differentiable_gather import gather as gather
from lockstep.collectives.differentiable_gather import rank_slice as rank_slice
from lockstep.collectives.global_mean_loss import global_mean as global_mean
from lockstep.collectives.info_nce_loss import info_nce as info_nce
from lockstep.collectives.nt_xent_loss import nt_xent as nt_xent

__all__ = ["gather", "global_mean", "info_nce", "nt_xent", "rank_slice"]
