# SPDX-License-Identifier: Apache-2.0
"""How the N gradients of N ranks become one: `GradientSync`, and the ways beside it."""

from __future__ import annotations

from typing import TypeAlias

from lockstep.sync.buffers import is_block as is_block
from lockstep.sync.buffers import is_expanded as is_expanded
from lockstep.sync.buffers import put as put_buffer
from lockstep.sync.data_parallel import ReplicatedModel as ReplicatedModel
from lockstep.sync.data_parallel import replica_devices as replica_devices
from lockstep.sync.gradient_sync import GradientSync as GradientSync
from lockstep.sync.gradient_sync import replicate as replicate
from lockstep.sync.inventory import buffer_places as buffer_places
from lockstep.sync.local_parameters import is_local as is_local
from lockstep.sync.local_parameters import local as local
from lockstep.sync.manual_average import average_gradients as average_gradients
from lockstep.sync.optimizer_undo_log import copy_over as copy_over
from lockstep.sync.optimizer_undo_log import overwrite as overwrite
from lockstep.sync.owner_server import OwnerServer as OwnerServer
from lockstep.sync.parameter_server import ParameterServer as ParameterServer
from lockstep.sync.shard_order import ShardOrder as ShardOrder
from lockstep.sync.single_process import SingleProcess as SingleProcess
from lockstep.sync.wire import OwnerAddress as OwnerAddress

Synchroniser: TypeAlias = GradientSync | SingleProcess
"""Makes one gradient of the ranks' gradients: over one transport or another, or without peers."""

__all__ = [
    "GradientSync",
    "OwnerAddress",
    "OwnerServer",
    "ParameterServer",
    "ReplicatedModel",
    "ShardOrder",
    "SingleProcess",
    "Synchroniser",
    "average_gradients",
    "buffer_places",
    "copy_over",
    "is_block",
    "is_expanded",
    "is_local",
    "local",
    "overwrite",
    "put_buffer",
    "replica_devices",
    "replicate",
]
