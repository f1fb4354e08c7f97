# SPDX-License-Identifier: Apache-2.0
"""The process of a parameter server: an actor beside the workers, without CPUs of its own.

It computes only while every worker waits for it, so it takes nothing from them. It outlives the
generations of the workers' group, each of which finds it at another address.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ray
from lockstep.engine.actor_bootstrap import bootstrap
from lockstep.engine.actor_failures import death_reason
from lockstep.engine.actor_termination import end_actor
from lockstep.engine.cluster import this_node
from lockstep.engine.rendezvous_store import LOOPBACK
from lockstep.errors import WorkerDiedError

if TYPE_CHECKING:
    from ray.actor import ActorClass, ActorProxy
    from ray.util.placement_group import PlacementGroup

    from lockstep.sync import ParameterServer, ServerAddress
    from ray import ObjectRef

_LONGEST_STEP_S: Final = 300.0
"""An optimizer's step may be under way when the next generation is to be served."""


class ServerActor:
    """Listens, then serves until the workers have left; then perhaps the next generation."""

    def __init__(self) -> None:
        bootstrap("lockstep.sync")
        self._server: ParameterServer | None = None

    def __repr__(self) -> str:
        return "parameter server"

    @ray.method(concurrency_group="control")
    def call_off(self, secret: bytes) -> None:
        """End `serve`: some of the server's workers are gone, or will not come.

        Args:
            secret: of the server that is meant; the next one may be there already.
        """
        server = self._server
        if server is not None and server.address.secret == secret:
            server.call_off()

    @ray.method
    def listen(
        self, only_node: str | None, size: int, secret: bytes, timeout_s: float
    ) -> tuple[ServerAddress, str, int]:
        """Where it listens, its node, and its process.

        Args:
            only_node: where all workers run; None if they run on several.
        """
        from lockstep.sync import ParameterServer

        node = this_node()
        host = LOOPBACK if node == only_node else ray.util.get_node_ip_address()
        self._server = ParameterServer(host, size, secret, timeout_s, before=self._server)
        return self._server.address, node, os.getpid()

    @ray.method
    def serve(self) -> None:
        """Until all workers of the generation have left."""
        assert self._server is not None, "listen() comes first"
        self._server.serve()


# Any: Ray's annotations do not know concurrency groups. The handles of its actors are typed.
_remote: Any = ray.remote
RemoteServer: ActorClass[ServerActor] = _remote(
    num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1}
)(ServerActor)


class ServerProcess:
    """A parameter server as the driver sees it; see `listen`.

    Args:
        group: the workers' placement group.
        bundle: where it runs in `group`.
        name: of its actor.
        timeout_s: how long a worker waits for an answer.

    Attributes:
        ends: resolves when the server has ended with its present workers, whatever ended it.
        pid: its process, on its own machine.
        address: where it listens.
    """

    def __init__(self, group: PlacementGroup, bundle: int, *, name: str, timeout_s: float) -> None:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options = RemoteServer.options(name=name, scheduling_strategy=strategy)
        self._actor: ActorProxy[ServerActor] = options.remote()
        self._timeout_s = timeout_s
        self._node = ""
        self.serve_ref: ObjectRef[None] | None = None
        self.pid = 0
        self.address: ServerAddress | None = None

    @property
    def is_here(self) -> bool:
        """Its process runs on the driver's machine."""
        return self._node == this_node()

    def listen(self, size: int, only_node: str | None) -> ServerAddress:
        """Have it serve another generation of the workers' group, with what it has.

        Args:
            size: how many workers will come.
            only_node: where all of them run; None if they run on several.

        Raises:
            WorkerDiedError: its process died, or does not answer.
        """
        is_first = self.address is None
        self.call_off()
        secret = secrets.token_bytes(32)
        # Has its turn when the server has ended with the workers of before.
        opened = self._actor.listen.remote(only_node, size, secret, self._timeout_s)
        limit_s = None if is_first else min(self._timeout_s, _LONGEST_STEP_S)
        try:
            self.address, self._node, self.pid = ray.get(opened, timeout=limit_s)
        except RayActorError as error:
            raise _death_error(error) from error
        except GetTimeoutError as error:
            raise _no_answer_error(limit_s) from error
        self.serve_ref = self._actor.serve.remote()
        return self.address

    def call_off(self) -> None:
        """Free the workers that wait for others there."""
        if self.address is not None:
            self._actor.call_off.remote(self.address.secret)

    def death_error(self) -> WorkerDiedError | None:
        """What to raise if its process died; None while it runs, or after it ended in order."""
        assert self.serve_ref is not None, "listen() comes first"
        ready, _ = ray.wait([self.serve_ref], timeout=0)
        try:
            ray.get(ready)
        except RayActorError as error:
            died = _death_error(error)
            died.__cause__ = error
            return died
        return None

    def close(self) -> None:
        """End the process."""
        end_actor(self._actor)


def _death_error(error: RayActorError) -> WorkerDiedError:
    return WorkerDiedError(
        "the process of the parameter server died",
        cause=death_reason(error),
        fix="look for the reason above (out of memory? killed?), then build a new"
        " trainer and load the last checkpoint",
    )


def _no_answer_error(waited_s: float | None) -> WorkerDiedError:
    return WorkerDiedError(
        "the process of the parameter server does not answer",
        where=f"for {waited_s} s, when the workers that are left were to go on with it",
        cause="it is stopped, or its machine cannot be reached",
        fix="build a new trainer and load the last checkpoint",
    )
