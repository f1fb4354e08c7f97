# SPDX-License-Identifier: Apache-2.0
"""How N gradients become one."""

from __future__ import annotations

from lockstep.sync.attach import replicate as replicate
from lockstep.sync.buffer_broadcast import buffer_places as buffer_places
from lockstep.sync.data_parallel import ReplicatedModel as ReplicatedModel
from lockstep.sync.data_parallel import replica_devices as replica_devices
from lockstep.sync.gradient_average import average_gradients as average_gradients
from lockstep.sync.gradient_sync import GradientSync as GradientSync
from lockstep.sync.local_parameters import is_local as is_local
from lockstep.sync.local_parameters import local as local
from lockstep.sync.parameter_server.messages import ServerAddress as ServerAddress
from lockstep.sync.parameter_server.server import ParameterServer as ParameterServer
from lockstep.sync.parameter_server.server_sync import ParameterServerSync as ParameterServerSync
from lockstep.sync.protocol import Synchroniser as Synchroniser
from lockstep.sync.shard_tree_sum import ShardOrder as ShardOrder
from lockstep.sync.single_process import SingleProcess as SingleProcess
from lockstep.sync.tensor_memory import copy_over as copy_over
from lockstep.sync.tensor_memory import is_block as is_block
from lockstep.sync.tensor_memory import is_expanded as is_expanded
from lockstep.sync.tensor_memory import overwrite as overwrite

__all__ = [
    "GradientSync",
    "ParameterServer",
    "ParameterServerSync",
    "ReplicatedModel",
    "ServerAddress",
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
    "replica_devices",
    "replicate",
]
