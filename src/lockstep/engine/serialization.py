# SPDX-License-Identifier: Apache-2.0
"""What travels to a worker and back, and whose fault it is if something cannot."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lockstep.engine.parametrization_pickler import dumps
from lockstep.errors import NotPicklableError
from lockstep.worker.state_broadcast import joined, taken_apart

if TYPE_CHECKING:
    import numpy as np

    from lockstep.worker import WorkerSpec


def pickled(value: Any, what: str) -> bytes:
    """`value` as bytes.

    Raises:
        NotPicklableError: names `what` and the type that cannot travel.
    """
    try:
        return dumps(value)
    # Whatever a user's __reduce__ raises; the usual ones are TypeError and PicklingError.
    except Exception as error:
        raise NotPicklableError(
            f"{what} cannot be sent to another process",
            got=f"{type(error).__name__}: {error}",
            fix="make it in `setup` (which runs in the worker), or pass what it is made from",
        ) from error


def pickled_spec(spec: WorkerSpec) -> bytes:
    """The spec as bytes; a failure names the argument, and the key of `config`."""
    if isinstance(spec.config, Mapping):
        for key, value in spec.config.items():
            pickled(value, f"config[{key!r}]")
    if spec.initialization_hook is not None:
        pickled(spec.initialization_hook, "initialization_hook")
    pickled(spec.operator_cls, f"the operator class {spec.operator_cls.__name__}")
    return pickled(spec, "the trainer's arguments")


def in_pieces(state: Any) -> tuple[bytes, list[Any]]:
    """`state` as what Ray carries without copying it into a pickle: its structure, and arrays."""
    tensors: list[torch.Tensor] = []
    structure = taken_apart(state, tensors)
    arrays = [
        (tensor.dtype, tuple(tensor.shape), _bytes_of(tensor.contiguous())) for tensor in tensors
    ]
    return structure, arrays


def from_pieces(structure: bytes, arrays: list[Any]) -> Any:
    """The opposite. Its tensors lie in Ray's memory: they may be read, and not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")
        tensors = [_tensor_of(*each) for each in arrays]
    return joined(structure, tensors)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    # By way of bytes: numpy has no bfloat16.
    flat: np.ndarray[Any, Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def _tensor_of(
    dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray[Any, Any]
) -> torch.Tensor:
    if data.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).reshape(shape)
