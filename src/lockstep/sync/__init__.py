# SPDX-License-Identifier: Apache-2.0
"""The reduction of the gradients of N ranks to one: `GradientSync`, its transports and variants."""

from __future__ import annotations

from typing import TypeAlias

from lockstep.sync.buffer_broadcast import agree_on_shapes as agree_on_shapes
from lockstep.sync.buffer_broadcast import buffer_places as buffer_places
from lockstep.sync.buffer_broadcast import copy_buffers as copy_buffers
from lockstep.sync.buffer_broadcast import put_buffers as put_buffers
from lockstep.sync.data_parallel import DataParallelModel as DataParallelModel
from lockstep.sync.data_parallel import replica_devices as replica_devices
from lockstep.sync.gradient_sync import GradientSync as GradientSync
from lockstep.sync.gradient_sync import replicate as replicate
from lockstep.sync.local_parameters import is_local as is_local
from lockstep.sync.local_parameters import is_local_buffer as is_local_buffer
from lockstep.sync.local_parameters import local as local
from lockstep.sync.local_parameters import named_local_tensors as named_local_tensors
from lockstep.sync.manual_average import average_gradients as average_gradients
from lockstep.sync.optimizer_guard import expect_alone as expect_alone
from lockstep.sync.optimizer_guard import note_reduced as note_reduced
from lockstep.sync.optimizer_guard import tell_apart as tell_apart
from lockstep.sync.parameter_server.server_connection import ServerAddress as ServerAddress
from lockstep.sync.parameter_server.server_loop import ParameterServer as ParameterServer
from lockstep.sync.parameter_server.server_sync import ParameterServerSync as ParameterServerSync
from lockstep.sync.shard_tree_sum import ShardOrder as ShardOrder
from lockstep.sync.single_process import SingleProcess as SingleProcess

Synchroniser: TypeAlias = GradientSync | SingleProcess
"""Reduces the ranks' gradients to one, over some transport; or has no peers."""

__all__ = [
    "DataParallelModel",
    "GradientSync",
    "ParameterServer",
    "ParameterServerSync",
    "ServerAddress",
    "ShardOrder",
    "SingleProcess",
    "Synchroniser",
    "agree_on_shapes",
    "average_gradients",
    "buffer_places",
    "copy_buffers",
    "is_local",
    "is_local_buffer",
    "local",
    "named_local_tensors",
    "put_buffers",
    "replica_devices",
    "replicate",
]
