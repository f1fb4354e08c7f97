# SPDX-License-Identifier: Apache-2.0
"""Gradient sync through a parameter server, which sums the gradients and also steps.

The rules of `GradientSync` hold: what the global gradient is, and what is refused. Only buckets are
summed in another way: every rank sends its own to the server, and gets the sum.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from lockstep.errors import ConfigurationError, LockstepError
from lockstep.pending_collective import Pending
from lockstep.sync.bucket_transport import BucketTransport
from lockstep.sync.gradient_sync import GradientSync
from lockstep.sync.parameter_server.messages import Message
from lockstep.sync.parameter_server.parameter_store import InProcessServer
from lockstep.sync.parameter_server.remote_optimizer import (
    RemoteOptimizer,
    optimizers_to_serve,
    pickle_optimizers,
)
from lockstep.sync.parameter_server.server_connection import ServerAddress, connect_to_server
from lockstep.sync.synced_tensors import refuse_shared_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from lockstep.group import Group
    from lockstep.sync.buckets import Bucket
    from lockstep.sync.parameter_server.messages import Channel


class ParameterServerSync(GradientSync):
    """The worker's side of a parameter server: see `GradientSync`; optimizers step at the server.

    After a synchronised backward ``parameter.grad`` is the global gradient on every rank, so
    that a loop may clip, unscale or log it. An optimizer's ``step`` sends rank 0's gradients to
    the server and fetches the weights.

    Args:
        optimizers: those of the registered modules; their ``step``, ``state_dict`` and
            ``load_state_dict`` become the server's until `detach`.
        address: where the server listens; None: its store is in this process, and there is one
            worker.
        resume_step: steps of the run that have happened, if the server served a generation of the
            group before this one: it goes on with the weights and optimizers that it has. None: it
            takes over those of rank 0.
        predecessor: this worker's side of the server in that generation; None for a new worker.

    Attributes:
        server: the store in this process; None if it is in another one.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        group: Group,
        address: ServerAddress | None,
        *,
        resume_step: int | None = None,
        predecessor: ParameterServerSync | None = None,
        **options: Any,
    ) -> None:
        self._served: list[RemoteOptimizer] = []
        self._released: list[RemoteOptimizer] = []
        store: InProcessServer | None = None if predecessor is None else predecessor.server
        self.server: InProcessServer | None = None if address else store or InProcessServer()
        former = [] if predecessor is None else predecessor._released
        # Before they get the server's attributes.
        loop_changes = [] if resume_step is None else [f.loop_changes(resume_step) for f in former]
        wanted = optimizers_to_serve(optimizers)
        if address is None and group.size > 1:
            raise ConfigurationError(
                "several ranks need one parameter server, and nobody says where it listens",
                where=group.place,
                fix='TorchTrainer(..., sync="parameter_server") starts one',
            )
        self._channel: Channel = (
            connect_to_server(address, group.rank, group.note_failure)
            if address
            else cast("Channel", self.server)
        )
        try:
            combine = self._sum_at_server
            transport = partial(BucketTransport, combine=combine, steps_alike=False)
            super().__init__(modules, group, make_transport=transport, **options)
        except BaseException:
            self._channel.close()
            raise
        try:
            slots = self._rounds.slots
            refuse_shared_memory(((s.name, s.param) for s in slots), "use another sync")
            self._serve(wanted, resume_step, leads=group.rank == 0)
            for own, changes in zip(self._served, loop_changes, strict=False):
                own.set_attributes(changes)
        except BaseException:
            self.detach()
            raise

    def _serve(
        self, optimizers: Sequence[torch.optim.Optimizer], resume_step: int | None, *, leads: bool
    ) -> None:
        """Let the server take over, and replace the steps of the optimizers.

        Gradient:
            None.

        Collective:
            Every rank. Blocks: no rank goes on before the server has rank 0's optimizers.
        """
        parameters = {slot.number: slot.param for slot in self._rounds.slots}
        body: bytes | int | None = None
        if leads:
            body = pickle_optimizers(optimizers, parameters) if resume_step is None else resume_step
        answer = self._channel.ask(Message("attach", body))
        weights: dict[int, torch.Tensor] | None = None
        numbers, have_states, attributes = answer.body
        if leads:
            pairs = zip(numbers, answer.tensors, strict=True)
            weights = {number: weight.to(parameters[number].device) for number, weight in pairs}
        number_of = {id(param): number for number, param in parameters.items()}
        of_each = zip(optimizers, have_states, attributes, strict=True)
        for number, (optimizer, has_state, own) in enumerate(of_each):
            self._served.append(
                RemoteOptimizer(
                    optimizer,
                    number,
                    number_of,
                    self._channel,
                    server_weights=weights,
                    has_state=has_state,
                    attributes=own,
                )
            )

    def set_undo_point(self, step: int | None) -> None:
        """See `GradientSync`: the server logs, for undoing, what its next steps change.

        Gradient:
            None.

        Collective:
            None; it travels with the next request.
        """
        for each in self._served:
            each.undo_point = step

    def has_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `GradientSync`."""
        return any(each.optimizer is optimizer for each in self._served)

    def _sum_at_server(self, group: Group, bucket: Bucket) -> Pending:
        """Send a bucket, wait for the sum.

        Gradient:
            ``bucket.flat`` becomes its sum over ranks, added in rank order.

        Collective:
            Every rank, same order. Blocks.
        """
        if group.size > 1:
            answer = self._channel.ask(Message("all_reduce", tensors=[bucket.flat]))
            bucket.flat.copy_(answer.tensors[0])
        return Pending()

    def detach(self) -> None:
        """Take the hooks off, make the optimizers ordinary ones, leave the server.

        A store in this process gives its state back; a server keeps it until it ends.
        Works after a failure as well. Idempotent.
        """
        served, self._served = self._served, []
        self._released = served or self._released
        for each in reversed(served):  # an optimizer may be served, and be within another one
            try:
                each.release(keep_state=self.server is not None)
            except LockstepError:
                # The optimizer was given parameters that the server does not know.
                each.release(keep_state=False)
        self._channel.close()
        super().detach()
