# SPDX-License-Identifier: Apache-2.0
"""What travels to a worker and back, and whose fault it is if something cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle

from lockstep.errors import NotPicklableError

if TYPE_CHECKING:
    from lockstep.worker import WorkerSpec


def pickled(value: Any, what: str) -> bytes:
    """`value` as bytes.

    Raises:
        NotPicklableError: names `what` and the type that cannot travel.
    """
    try:
        data: bytes = cloudpickle.dumps(value)
        return data
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
