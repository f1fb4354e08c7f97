# SPDX-License-Identifier: Apache-2.0
"""`DDPRound`: one round of reduction under ``sync="ddp"``, one model after the other.

A turn is the reduction of one model: the ranks agree which model's turn it is (`ddp_round_header`),
send the model's buckets, wait, and divide once by the sum of the weights. With one model its
buckets leave while backward still runs; with several a model's leave together, so that the buckets
of two models that finish at the same time never mix, and a rank without a backward knows the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lockstep._torch_compat import call_at_end_of_task
from lockstep.errors import GradientNotReducedError
from lockstep.expected_exchange import is_exchange_expected
from lockstep.sync import round_error_texts
from lockstep.sync.ddp_round_header import Header, exchange_headers, make_header
from lockstep.sync.ddp_wrapper import copy_from_view, views_of, write_to_view
from lockstep.sync.round_contribution import Contribution, Fault

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from lockstep.pending_collective import Pending
    from lockstep.sync.bucket_order import BucketOrder
    from lockstep.sync.buckets import Slot
    from lockstep.sync.ddp_wrapper import DDPWrapper
    from lockstep.sync.round_contribution import RoundTotals
    from lockstep.sync.transport_protocol import Gradients, RoundController


@dataclass
class _BucketInFlight:
    """A bucket whose all-reduce may run; DDP waits for `future`, None without a backward."""

    flat: torch.Tensor
    params: Sequence[torch.Tensor]
    future: torch.futures.Future[torch.Tensor] | None = None
    pending: Pending | None = None

    def views(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter with the place of its gradient in the bucket."""
        return zip(self.params, views_of(self.flat, self.params), strict=True)


@dataclass
class Turn:
    """The reduction of one model in this round.

    Attributes:
        buckets: of the model, so far.
        used: how many ranks used each of its parameters; None where all must be used.
        is_led: the ranks agreed that it is this model's turn.
        is_reduced: the buckets hold the global gradients.
    """

    buckets: list[_BucketInFlight] = field(default_factory=list)
    used: torch.Tensor | None = None
    used_pending: Pending | None = None
    is_led: bool = False
    is_reduced: bool = False


class DDPRound:
    """The reductions of one backward, or of the peers' backward, which this rank follows.

    Args:
        controller: defines the rounds in which the transport moves gradients.
        models: all of them, in an order that is the same on every rank.
        slots: the synchronised parameters, by the ids of the tensors.
        used: the parameters that got a gradient on this rank since the last round; it grows.
        finds_unused: the ranks exchange which parameters were used.

    Attributes:
        replacement_gradients: while a backward of weight zero runs, the window's gradients from
            before it.
        contribution: of this rank.
        sums: of all ranks' contributions; None before the first turn.
        refusal: an exception of a turn, kept where raising it would lose its type.
    """

    def __init__(
        self,
        controller: RoundController,
        models: Sequence[DDPWrapper],
        slots: Mapping[int, Slot],
        used: Collection[Slot],
        *,
        finds_unused: bool,
    ) -> None:
        self._controller = controller
        self._models = models
        self._slots = slots
        self._used = used
        self._finds_unused = finds_unused
        self._turns = {model: Turn() for model in models}
        self._ends_together = False
        self._step = 0
        self._order: BucketOrder | None = None
        self._sends_early = False
        self.contribution = Contribution()
        self.replacement_gradients: Gradients | None = None
        self.sums: RoundTotals | None = None
        self.refusal: BaseException | None = None
        self._sent: set[Slot] = set()
        self._late: list[Slot] = []

    def set_contribution(self, contribution: Contribution, step: int) -> None:
        """Set this rank's contribution, and the optimizer step that it is for."""
        self.contribution = contribution
        self._step = step

    def set_order(self, order: BucketOrder, *, sends_early: bool) -> None:
        """Set the order of the backward that begins, and whether buckets may leave inside it."""
        self._order, self._sends_early = order, sends_early

    def _slot_of(self, param: torch.Tensor) -> Slot:
        slot = self._slots.get(id(param))
        if slot is None:
            fault = Fault.of("added_parameter", [f"one of shape {tuple(param.shape)}"])
            raise round_error_texts.fault_error(*fault, where=self._controller.place)
        return slot

    def note_arrival(self, slot: Slot) -> None:
        """Note that a gradient was accumulated; it is late if its bucket has been sent."""
        if slot in self._sent:
            self._late.append(slot)

    @property
    def has_sent_buckets(self) -> bool:
        """Whether buckets were sent, so that peers wait for the rest of the round."""
        return any(turn.is_led for turn in self._turns.values())

    def unfinished_models(self) -> list[DDPWrapper]:
        """The models whose reducer waits for gradients that will not come."""
        return [m for m, turn in self._turns.items() if turn.buckets and not turn.is_reduced]

    def reduced_models(self) -> list[DDPWrapper]:
        """The models whose gradients are reduced."""
        return [model for model, turn in self._turns.items() if turn.is_reduced]

    def models_reduced_by_backward(self) -> list[DDPWrapper]:
        """The models that this rank's own backward has reduced."""
        turns = self._turns.items()
        return [
            m for m, turn in turns if turn.is_reduced and turn.buckets and turn.buckets[0].future
        ]

    # ------------------------------------------------------------------ led by a backward

    def reduce_bucket(self, model: DDPWrapper, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket that DDP has filled.

        Returns:
            A future for which DDP waits at the end of backward; `_complete` sets it before that.

        Collective:
            Every rank, in the order of the backward. With the last bucket, or with the first of
            an only model, a small blocking all-reduce; then one all-reduce per bucket.
        """
        flat = bucket.buffer()
        devices = [flat.device] if flat.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        turn = self._turns[model]
        turn.buckets.append(_BucketInFlight(flat, bucket.parameters(), future))
        self._sent.update(map(self._slot_of, bucket.parameters()))
        # An exception that is raised here would lose its type in C++.
        if self.refusal is None:
            try:
                self._send(model, turn, bucket.is_last())
            except BaseException as error:
                self.refusal = error
        if bucket.is_last():
            # Before what DDP queues after this: it writes the buckets into `parameter.grad`.
            call_at_end_of_task(lambda: self._complete(model, turn))
        return future

    def _send(self, model: DDPWrapper, turn: Turn, is_last: bool) -> None:
        if not (is_last or len(self._models) == 1):
            return
        if not self._sends_early or is_exchange_expected(self._controller.attached_group()):
            return  # `_complete` sends them: what else communicates goes first, on every rank
        self._send_all(model, turn, is_last)

    def _send_all(self, model: DDPWrapper, turn: Turn, is_last: bool) -> None:
        assert self._order is not None
        self._order.before_departure()
        if not turn.is_led:
            mine = self.contribution
            late = self._controller.has_late_parameters
            header = make_header(mine, self._step, model=model.signature(), late=late)
            self._note(exchange_headers(self._controller.attached_group(), header, mine))
            turn.is_led = True
        for bucket in turn.buckets:
            if bucket.pending is None:
                self._send_bucket(bucket)
        if is_last and self._finds_unused and turn.used_pending is None:
            self._reduce_used_flags(model, turn)
        self._order.after_departure()

    def _note(self, header: Header) -> None:
        self.sums = self.sums or header.sums
        follow = header.leads < self._controller.attached_group().size
        self._ends_together = self._ends_together or follow or header.late > 0

    def _send_bucket(self, bucket: _BucketInFlight) -> None:
        """Put the gradients of this rank's window into a bucket, and send it."""
        mine, flat = self.contribution, bucket.flat
        if mine.has_zero_weight:
            flat.zero_()
        elif self.replacement_gradients is not None:
            for param, view in bucket.views():
                write_to_view(view, self.replacement_gradients.get(self._slot_of(param)))
        if mine.scale != 1.0 and not mine.has_zero_weight:
            flat.mul_(mine.scale)
        bucket.pending = self._controller.attached_group().all_reduce(flat)

    def _reduce_used_flags(self, model: DDPWrapper, turn: Turn) -> None:
        counts = not self.contribution.is_borrowed
        used = [float(counts and slot in self._used) for slot in model.slots]
        turn.used = torch.tensor(used, device=self._controller.attached_group().device)
        turn.used_pending = self._controller.attached_group().all_reduce(turn.used)

    def _complete(self, model: DDPWrapper, turn: Turn) -> None:
        """Wait for a model's buckets, divide them and give them to DDP."""
        if self.refusal is not None:
            raise self.refusal
        if any(bucket.pending is None for bucket in turn.buckets):
            self._send_all(model, turn, is_last=True)
        assert self.sums is not None
        for bucket in turn.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            if self._controller.weights.averages and self.sums.weight != 1.0:
                bucket.flat.div_(self.sums.weight)
            if bucket.future is not None:
                bucket.future.set_result(bucket.flat)
        if turn.used_pending is not None:
            turn.used_pending.wait()
        turn.is_reduced = True

    # ------------------------------------------------------------------ following

    def follow(self) -> None:
        """Take part in the reductions of the peers' backward, with this rank's gradients or none.

        Collective:
            Every rank: this, or a backward. The same calls as the peers' backward, and a small
            all-reduce in which they say that it has ended.

        Raises:
            GradientNotReducedError: the peers lead with a model that is another one here.
        """
        group, mine = self._controller.attached_group(), self.contribution
        for model in self._models:
            model.follow_frozen()
        while True:
            header = exchange_headers(group, make_header(mine, self._step), mine)
            if header.leads:
                self._note(header)
                self._take_turn(self._led_model(round(header.model / header.leads)))
                continue
            if not header.ends and header.sums.plain + header.sums.weighted > 0:
                # All ranks follow, and some hold gradients of a window: every model, in order.
                self.sums = header.sums
                for model in self._models:
                    if model.reduced:
                        self._take_turn(model, reduces_flags=True)
            return

    def _led_model(self, signature: int) -> DDPWrapper:
        for model in self._models:
            if model.signature() == signature:
                return model
        raise GradientNotReducedError(
            "other ranks reduce a model that is another one here",
            where=self._controller.place,
            cause="layers were frozen or unfrozen on some ranks only",
            fix="freeze the same layers on every rank",
        )

    def _take_turn(self, model: DDPWrapper, *, reduces_flags: bool = False) -> None:
        """Reduce `model` without a backward.

        Args:
            reduces_flags: exchange which parameters were used, because no rank leads.
        """
        turn = self._turns[model]
        turn.is_led = True
        for flat, params in model.empty_buckets():
            bucket = _BucketInFlight(flat, params)
            turn.buckets.append(bucket)
            for param, view in bucket.views():
                write_to_view(view, param.grad)
            self._send_bucket(bucket)
        if reduces_flags or self._finds_unused:
            self._reduce_used_flags(model, turn)
        self._complete(model, turn)
        self._write_gradients(model, turn)

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """After the backward: tell followers how it has ended, and which parameters were used.

        Raises:
            LockstepError: this rank or another has to refuse the round; see `round_checks.judge`.
        """
        if self.refusal is not None:
            raise self.refusal
        if self._late:
            raise gradient_twice_error(self._controller.place, f"`{self._late[0].name}`")
        mine, halves = self.contribution, self._half_sent()
        if self._ends_together:
            for model in halves:
                self._send_rest(model)
        # If this rank led no model, peers may wait for its faults.
        if self._ends_together if halves or self.models_reduced_by_backward() else mine.faults:
            ending = make_header(mine, self._step, ends=True)
            exchange_headers(self._controller.attached_group(), ending, mine)
        for model, turn in self._turns.items():
            if turn.is_reduced and turn.used is not None:
                self._write_gradients(model, turn)

    def _half_sent(self) -> list[DDPWrapper]:
        return [m for m, turn in self._turns.items() if turn.is_led and not turn.is_reduced]

    def _send_rest(self, model: DDPWrapper) -> None:
        """Send the other buckets of a model: peers wait for them before the refusal."""
        turn = self._turns[model]
        for flat, params in list(model.empty_buckets())[len(turn.buckets) :]:
            turn.buckets.append(_BucketInFlight(flat, params))
            self._send_bucket(turn.buckets[-1])
        if self._finds_unused and turn.used_pending is None:
            self._reduce_used_flags(model, turn)
        for pending in [*(bucket.pending for bucket in turn.buckets), turn.used_pending]:
            if pending is not None:
                pending.wait()

    def _write_gradients(self, model: DDPWrapper, turn: Turn) -> None:
        """Write a gradient to each parameter that some rank used, and None to the others."""
        unused: set[Slot] = set()
        if turn.used is not None:
            counts = zip(model.slots, turn.used.tolist(), strict=True)
            unused = {slot for slot, count in counts if not count}
        for bucket in turn.buckets:
            for param, view in bucket.views():
                is_unused = self._slot_of(param) in unused
                param.grad = None if is_unused else copy_from_view(view, param)


def gradient_twice_error(place: str, what: str) -> GradientNotReducedError:
    return GradientNotReducedError(
        "a parameter's gradient came twice in one backward, which torch's DDP cannot reduce",
        where=place,
        got=what,
        cause="reentrant checkpointing through one layer twice, or a parameter used outside the"
        " model's forward",
        fix='torch.utils.checkpoint(..., use_reentrant=False), or leave out sync="ddp"',
    )
