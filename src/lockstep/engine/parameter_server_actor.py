# SPDX-License-Identifier: Apache-2.0
"""The process of a parameter server: an actor beside the workers, without CPUs of its own.

The server computes only while every worker waits for it, so it takes no CPU time from them. It
outlives the generations of the workers' group; for each generation it listens at a new address.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import ray
from lockstep.engine.actor_imports_and_signals import set_up_actor_process
from lockstep.engine.actor_termination import end_actor
from lockstep.engine.cluster import this_node
from lockstep.engine.ray_errors import ACTOR_DEATHS, death_reason
from lockstep.engine.rendezvous_store import LOOPBACK
from lockstep.error_texts import LOAD_LAST
from lockstep.errors import WorkerDiedError

if TYPE_CHECKING:
    from ray.actor import ActorClass, ActorProxy
    from ray.exceptions import RayError
    from ray.util.placement_group import PlacementGroup

    from lockstep.sync import ParameterServer, ServerAddress
    from ray import ObjectRef

_LONGEST_STEP_S: Final = 300.0
"""Time limit for the server's optimizer step that runs when the next generation forms."""


class ServerActor:
    """Listens and serves until the workers of a generation have left, generation by generation."""

    def __init__(self) -> None:
        set_up_actor_process("lockstep.sync")
        self._server: ParameterServer | None = None

    def __repr__(self) -> str:
        return "parameter server"

    @ray.method(concurrency_group="control")
    def stop(self, secret: bytes) -> None:
        """End `serve`, because some of the server's workers are gone or will not connect.

        Args:
            secret: the secret of the server to end; its successor may exist already.
        """
        server = self._server
        if server is not None and server.address.secret == secret:
            server.stop()

    @ray.method
    def listen(
        self, only_node: str | None, size: int, secret: bytes, timeout_s: float
    ) -> tuple[ServerAddress, str, int]:
        """Make the server of a generation; return its address, its node and its pid.

        Args:
            only_node: the node of all workers; None if they run on several nodes.
        """
        from lockstep.sync import ParameterServer

        node = this_node()
        host = LOOPBACK if node == only_node else ray.util.get_node_ip_address()
        self._server = ParameterServer(host, size, secret, timeout_s, predecessor=self._server)
        return self._server.address, node, os.getpid()

    @ray.method
    def serve(self) -> None:
        """Serve until all workers of the generation have left."""
        assert self._server is not None, "listen() comes first"
        self._server.serve()


# Any: Ray's annotations do not know concurrency groups. The handles of its actors are typed.
_remote: Any = ray.remote
RemoteServer: ActorClass[ServerActor] = _remote(
    num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1}
)(ServerActor)


class ServerHandle:
    """The driver's handle of a parameter server in an actor.

    Args:
        group: the workers' placement group.
        bundle: the bundle of `group` that the server runs in.
        name: the name of the actor.
        timeout_s: how long a worker waits for an answer.

    Attributes:
        serve_ref: resolves when `serve` has ended, in order or not.
        pid: the server's process, on its own machine.
        address: the address at which the server listens.
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
        """Whether the server's process runs on the driver's machine."""
        return self._node == this_node()

    def listen(self, size: int, only_node: str | None) -> ServerAddress:
        """Let the server serve another generation of the workers' group, with the state that it
        has.

        Args:
            size: the number of workers that will connect.
            only_node: the node of all workers; None if they run on several nodes.

        Raises:
            WorkerDiedError: the server's process died, or does not answer.
        """
        is_first = self.address is None
        self.stop()
        secret = secrets.token_bytes(32)
        # The actor runs this when `serve` has ended for the generation before.
        opened = self._actor.listen.remote(only_node, size, secret, self._timeout_s)
        limit_s = None if is_first else min(self._timeout_s, _LONGEST_STEP_S)
        try:
            self.address, self._node, self.pid = ray.get(opened, timeout=limit_s)
        except ACTOR_DEATHS as error:
            raise _death_error(error) from error
        except GetTimeoutError as error:
            raise _no_answer_error(limit_s) from error
        self.serve_ref = self._actor.serve.remote()
        return self.address

    def stop(self) -> None:
        """Free the workers that wait at the server for other workers."""
        if self.address is not None:
            self._actor.stop.remote(self.address.secret)

    def death_error(self) -> WorkerDiedError | None:
        """The error to raise if the server's process died; None while it lives."""
        assert self.serve_ref is not None, "listen() comes first"
        ready, _ = ray.wait([self.serve_ref], timeout=0)
        try:
            ray.get(ready)
        except ACTOR_DEATHS as error:
            died = _death_error(error)
            died.__cause__ = error
            return died
        return None

    def close(self) -> None:
        """End the process."""
        end_actor(self._actor)


def _death_error(error: RayError) -> WorkerDiedError:
    return WorkerDiedError(
        "the process of the parameter server died",
        cause=death_reason(error),
        fix=f"look for the reason above (out of memory? killed?), then {LOAD_LAST}",
    )


def _no_answer_error(waited_s: float | None) -> WorkerDiedError:
    return WorkerDiedError(
        "the process of the parameter server does not answer",
        where=f"for {waited_s} s, when the workers that are left were to go on with it",
        cause="it is stopped, or its machine cannot be reached",
        fix=LOAD_LAST,
    )
