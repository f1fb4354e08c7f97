# SPDX-License-Identifier: Apache-2.0
"""N workers train one PyTorch model, and no gradient is ever silently wrong.

Names are imported when they are first used: a worker process can be told what to do, and the
command line can answer, before torch has been imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from lockstep._version import __version__ as __version__
from lockstep.paused_gc import pause_gc

if TYPE_CHECKING:
    from lockstep.collectives import gather, global_mean, info_nce, nt_xent, rank_slice
    from lockstep.data import shard_loader
    from lockstep.engine.actor_pool import prestart
    from lockstep.errors import LockstepError
    from lockstep.operator import TrainingOperator
    from lockstep.sync import GradientSync, average_gradients, local, replicate
    from lockstep.trainer import Callback, TorchTrainer

__all__ = [
    "Callback",
    "GradientSync",
    "LockstepError",
    "TorchTrainer",
    "TrainingOperator",
    "average_gradients",
    "gather",
    "global_mean",
    "info_nce",
    "local",
    "nt_xent",
    "prestart",
    "rank_slice",
    "replicate",
    "shard_loader",
]

_HOMES: Final = {
    "Callback": "trainer",
    "GradientSync": "sync",
    "LockstepError": "errors",
    "TorchTrainer": "trainer",
    "TrainingOperator": "operator",
    "average_gradients": "sync",
    "gather": "collectives",
    "global_mean": "collectives",
    "info_nce": "collectives",
    "local": "sync",
    "nt_xent": "collectives",
    "prestart": "engine.actor_pool",
    "rank_slice": "collectives",
    "replicate": "sync",
    "shard_loader": "data",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        # `import lockstep; lockstep.keys` works as if it had been imported eagerly.
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    with pause_gc():
        value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
