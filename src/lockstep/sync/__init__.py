# SPDX-License-Identifier: Apache-2.0
"""How N gradients become one."""

from __future__ import annotations

from lockstep.sync.alone import Alone as Alone
from lockstep.sync.attach import replicate as replicate
from lockstep.sync.average import average_gradients as average_gradients
from lockstep.sync.buffers import is_block as is_block
from lockstep.sync.buffers import is_expanded as is_expanded
from lockstep.sync.buffers import put as put_buffer
from lockstep.sync.data_parallel import ReplicatedModel as ReplicatedModel
from lockstep.sync.data_parallel import replica_devices as replica_devices
from lockstep.sync.gradient_sync import GradientSync as GradientSync
from lockstep.sync.inventory import buffer_places as buffer_places
from lockstep.sync.owner_server import OwnerServer as OwnerServer
from lockstep.sync.ownership import is_local as is_local
from lockstep.sync.ownership import local as local
from lockstep.sync.parameter_server import ParameterServer as ParameterServer
from lockstep.sync.protocol import Synchroniser as Synchroniser
from lockstep.sync.shard_order import ShardOrder as ShardOrder
from lockstep.sync.undoing import copy_over as copy_over
from lockstep.sync.undoing import overwrite as overwrite
from lockstep.sync.wire import OwnerAddress as OwnerAddress

__all__ = [
    "Alone",
    "GradientSync",
    "OwnerAddress",
    "OwnerServer",
    "ParameterServer",
    "ReplicatedModel",
    "ShardOrder",
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
