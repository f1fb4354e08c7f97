# SPDX-License-Identifier: Apache-2.0
"""The process of a parameter server: an actor beside the workers, without CPUs of its own.

It computes only while every worker waits for it, so it takes nothing from them.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ray
from lockstep.engine.rendezvous import LOOPBACK
from lockstep.errors import WorkerDiedError
from lockstep.imports import no_collections

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from lockstep.sync import OwnerAddress


class ServerActor:
    """Listens, then serves until the workers have left."""

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with no_collections():
            for module in ("torch._dynamo", "lockstep.sync"):
                import_module(module)
        gc.freeze()
        self._server: Any = None

    def __repr__(self) -> str:
        return "parameter server"

    def listen(
        self, on_loopback: bool, size: int, secret: bytes, timeout_s: float
    ) -> tuple[OwnerAddress, int]:
        """Where it listens, and its process."""
        from lockstep.sync import OwnerServer

        host = LOOPBACK if on_loopback else ray.util.get_node_ip_address()
        self._server = OwnerServer(host, size, secret, timeout_s)
        return self._server.address, os.getpid()

    def serve(self) -> None:
        self._server.serve()


# Any: Ray's annotations do not know what decorating a class gives.
_make_actor: Any = ray.remote
RemoteServer = _make_actor(num_cpus=0, max_restarts=0, max_task_retries=0)(ServerActor)


class ServerProcess:
    """A parameter server as the driver sees it.

    Args:
        room: the workers' placement group; the server runs where its first bundle is.
        name: of its actor.
        on_loopback: every worker runs on this machine.
        size: how many workers will come.
        timeout_s: how long one of them waits for an answer.

    Attributes:
        ends: resolves when the server has ended, whatever ended it.
        address: where it listens.
        pid: its process, on its own machine.
        on_loopback: that is this machine.
    """

    def __init__(
        self, room: PlacementGroup, *, name: str, on_loopback: bool, size: int, timeout_s: float
    ) -> None:
        self.on_loopback = on_loopback
        strategy = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=0)
        self._actor = RemoteServer.options(name=name, scheduling_strategy=strategy).remote()
        try:
            self.address, self.pid = self._opened(on_loopback, size, timeout_s)
        except BaseException:
            self.close()
            raise
        self.ends = self._actor.serve.remote()

    def _opened(self, on_loopback: bool, size: int, timeout_s: float) -> tuple[OwnerAddress, int]:
        secret = secrets.token_bytes(32)
        opened: tuple[OwnerAddress, int] = ray.get(
            self._actor.listen.remote(on_loopback, size, secret, timeout_s)
        )
        return opened

    def death(self) -> WorkerDiedError | None:
        """What to raise if its process died; None while it runs, or after it ended in order."""
        ready, _ = ray.wait([self.ends], timeout=0)
        try:
            ray.get(ready)
        except RayActorError as error:
            died = WorkerDiedError(
                "the process of the parameter server died",
                cause=next(iter(str(error).splitlines()), None),
                fix="look for the reason above (out of memory? killed?), then build a new"
                " trainer and load the last checkpoint",
            )
            died.__cause__ = error
            return died
        return None

    def close(self) -> None:
        """End the process."""
        ray.kill(self._actor, no_restart=True)
