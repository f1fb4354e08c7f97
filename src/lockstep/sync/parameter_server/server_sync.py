# SPDX-License-Identifier: Apache-2.0
"""Gradient sync through one owner, who also steps: a parameter server.

What a gradient is, when it is global and what is refused are the rules of `GradientSync`; only
the way over which buckets are summed is another one, a star with the owner in its middle.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigurationError, LockstepError
from lockstep.group import Pending
from lockstep.sync.bucket_transport import BucketTransport
from lockstep.sync.gradient_sync import GradientSync
from lockstep.sync.parameter_server.messages import Message, ServerAddress, connect_to_server
from lockstep.sync.parameter_server.parameter_store import InProcessServer
from lockstep.sync.parameter_server.remote_optimizer import (
    RemoteOptimizer,
    optimizers_to_serve,
    shipped,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from lockstep.group import Group
    from lockstep.sync.buckets import Bucket
    from lockstep.sync.parameter_server.messages import Channel


class ParameterServerSync(GradientSync):
    """The worker's side: modules and optimizers whose owner lives elsewhere.

    After a synchronised backward ``parameter.grad`` is the global gradient on every rank, so
    that a loop may clip, unscale or log it. An optimizer's ``step`` sends rank 0's gradients to
    the owner and fetches the weights.

    Args:
        optimizers: those of the registered modules; their ``step``, ``state_dict`` and
            ``load_state_dict`` become the owner's until `detach`.
        address: where the owner listens; None: it lives here, and there is one worker.
        goes_on_at: steps of the run that have happened, if the owner served a generation of the
            group before this one; it then goes on with what it has. None: it takes over what the
            workers have.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        group: Group,
        address: ServerAddress | None,
        *,
        goes_on_at: int | None = None,
        **options: Any,
    ) -> None:
        self._served: list[RemoteOptimizer] = []
        self._is_remote = address is not None
        wanted = optimizers_to_serve(optimizers)
        if address is None and group.size > 1:
            raise ConfigurationError(
                "several ranks need one parameter server, and nobody says where it listens",
                where=f"rank {group.rank} of {group.size}",
                fix='TorchTrainer(..., sync="parameter_server") starts one',
            )
        self._channel: Channel = (
            connect_to_server(address, group.rank) if address else InProcessServer()
        )
        try:
            transport = partial(BucketTransport, combine=self._sum_at_the_owner)
            super().__init__(modules, group, make_transport=transport, **options)
        except BaseException:
            self._channel.close()
            raise
        try:
            self._serve(wanted, goes_on_at, leads=group.rank == 0)
        except BaseException:
            self.detach()
            raise

    def _serve(
        self, optimizers: Sequence[torch.optim.Optimizer], goes_on_at: int | None, *, leads: bool
    ) -> None:
        parameters = {slot.number: slot.param for slot in self._rounds.slots}
        number_of = {id(param): number for number, param in parameters.items()}
        owned = self._owned(optimizers, goes_on_at, parameters) if leads else None
        for number, optimizer in enumerate(optimizers):
            served = RemoteOptimizer(optimizer, number, number_of, self._channel, owned=owned)
            self._served.append(served)

    def _owned(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        goes_on_at: int | None,
        parameters: Mapping[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Make the owner ready; the weights that it has then, by number."""
        if goes_on_at is None:
            self._channel.ask(Message("adopt", shipped(optimizers, parameters)))
            return {number: param.detach().clone() for number, param in parameters.items()}
        answer = self._channel.ask(Message("inherit", goes_on_at))
        pairs = zip(answer.about, answer.tensors, strict=True)
        return {number: weight.to(parameters[number].device) for number, weight in pairs}

    def may_go_back_to(self, step: int | None) -> None:
        """See `GradientSync`: the owner keeps what its next steps change.

        Gradient:
            None.

        Collective:
            None; it travels with the next request.
        """
        for each in self._served:
            each.may_go_back_to = step

    def has_state_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `GradientSync`."""
        return any(each.optimizer is optimizer for each in self._served)

    def _sum_at_the_owner(self, group: Group, bucket: Bucket) -> Pending:
        """Send a bucket, wait for the sum.

        Gradient:
            ``bucket.flat`` becomes its sum over ranks, added in rank order.

        Collective:
            Every rank, same order. Blocks.
        """
        if group.size > 1:
            answer = self._channel.ask(Message("add", tensors=[bucket.flat]))
            bucket.flat.copy_(answer.tensors[0])
        return Pending(None, "add", self._rounds.place)

    def detach(self) -> None:
        """Take the hooks off, make the optimizers ordinary ones, leave the owner.

        An owner that lives here gives its state back; one elsewhere keeps it until it ends.
        Works after a failure as well. Idempotent.
        """
        served, self._served = self._served, []
        for each in served:
            try:
                each.release(keep_state=not self._is_remote)
            except LockstepError:
                # An optimizer that was changed beyond what its owner knows.
                each.release(keep_state=False)
        self._channel.close()
        super().detach()
