# SPDX-License-Identifier: Apache-2.0
"""What ``torch.autograd.grad`` returns is each rank's own, and gets into no step unreduced."""

import pytest
import torch
from torch import nn

from harness import gradients
from lockstep.sync.autograd_grad_watch import AutogradGradWatch
from lockstep.sync.buckets import Slot
from ranks.programs import X, mlp
from ranks.test_replicate_exact import weights
from ranks.ways import assert_exact, built, every_way, mean_square, momentum, on_ranks, refused

PARTS = (slice(0, 8), slice(8, 12))
WEIGHTS = (8, 4)


def own(rank, part=None):
    """Gradients of this rank's rows (or of `part`); beside DDP's wrapper, which would wait."""
    loss = mean_square(rank.plain, PARTS[rank.number] if part is None else part)
    return torch.autograd.grad(loss, rank.params)


def reduced(rank):
    rank.sync.backward(mean_square(rank.model, PARTS[rank.number]), weight=WEIGHTS[rank.number])


def after(rank, part=None):
    reduced(rank)
    for param, gradient in zip(rank.params, own(rank, part), strict=True):
        param.grad += gradient


def before(rank, part=None):
    for param, gradient in zip(rank.params, own(rank, part), strict=True):
        param.grad = gradient
    reduced(rank)


def functionally(rank, part=None):
    reduced(rank)
    for param, gradient in zip(rank.params, own(rank, part), strict=True):
        param.grad = param.grad + gradient


def instead(rank, part=None):
    reduced(rank)
    for param, gradient in zip(rank.params, own(rank, part), strict=True):
        param.grad = gradient


def through_data(rank, part=None):
    reduced(rank)
    for param, gradient in zip(rank.params, own(rank, part), strict=True):
        param.grad.data.add_(gradient)


@every_way
@pytest.mark.parametrize("how", [after, before, functionally, instead, through_data])
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_what_is_each_ranks_own_is_refused_before_the_step(way, how, cap_mb):
    def body(rank):
        how(rank)
        rank.optimizer.step()

    refused(way, "LS101", body, bucket_cap_mb=cap_mb)


@every_way
@pytest.mark.parametrize("how", [after, functionally])
def test_also_in_a_later_step(way, how):
    def body(rank):
        reduced(rank)
        rank.optimizer.step()
        rank.optimizer.zero_grad()
        how(rank)
        rank.optimizer.step()

    refused(way, "LS101", body, moved=True)


@every_way
@pytest.mark.parametrize("how", [after, before, functionally])
def test_what_is_the_same_on_every_rank_may_be_added(way, how):
    """A penalty on all of the global batch, say."""

    def body(rank):
        seen = []
        for _ in range(3):
            rank.optimizer.zero_grad()
            how(rank, slice(None))
            seen.append(gradients(rank.plain))
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    true, seen = built(), []
    optimizer = momentum(true)
    for _ in range(3):
        optimizer.zero_grad()
        (2 * mean_square(true)).backward()
        seen.append(gradients(true))
        optimizer.step()
    assert_exact(on_ranks(way, body), [*seen, weights([true])])


def clip_norm(params):
    nn.utils.clip_grad_norm_(params, 0.05)


def clip_value(params):
    nn.utils.clip_grad_value_(params, 0.01)


def clip_each(params):
    for param in params:
        nn.utils.clip_grad_norm_([param], 0.05)


def clip_one(params):
    nn.utils.clip_grad_value_(params[:1], 0.01)


@every_way
@pytest.mark.parametrize("clip", [clip_norm, clip_value, clip_each, clip_one])
def test_a_log_of_one_rank_alone_holds_nobody_up(way, clip):
    def body(rank):
        seen, logged = [], []
        for _ in range(3):
            rank.optimizer.zero_grad()
            if rank.number == 0:
                logged.append(own(rank)[0].norm())
            reduced(rank)
            if rank.number == 0:
                logged.append(own(rank)[0].norm())
            clip(rank.params)
            seen.append(gradients(rank.plain))
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    true, seen = built(), []
    optimizer = momentum(true)
    for _ in range(3):
        optimizer.zero_grad()
        mean_square(true).backward()
        clip(list(true.parameters()))
        seen.append(gradients(true))
        optimizer.step()
    assert_exact(on_ranks(way, body), [*seen, weights([true])])


def by_hand(rank, lr=0.1):
    found = own(rank)
    with torch.no_grad():
        for param, gradient in zip(rank.params, found, strict=True):
            param -= lr * gradient


@pytest.mark.parametrize("shape", [(40,), ()], ids=["vector", "scalar"])
def test_an_addition_is_no_factor_also_where_few_elements_tell(shape):
    param = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    slot = Slot(0, "weight", param)
    captures = AutogradGradWatch([slot], can_wait=True)
    first = torch.zeros_like(param)
    first.view(-1)[0] = 2.0
    slot.set_reduced(first)
    captures.note("rank 0", 1, 0)
    first.view(-1)[-1] += 1.0  # a vector's last element is not among the samples
    assert captures.holds_own_gradients([slot], set)


def by_hand_through_data(rank):
    for param, gradient in zip(rank.params, own(rank), strict=True):
        param.data.add_(gradient, alpha=-0.1)


@every_way
@pytest.mark.parametrize("update", [by_hand, by_hand_through_data])
def test_an_update_by_hand_is_refused_at_the_second(way, update):
    def body(rank):
        update(rank)
        update(rank)

    for error in refused(way, "LS101", body, moved=True):
        assert "no gradient was reduced" in str(error)


def two_optimizers(rank):
    """The first one holds the bias of the last layer alone."""
    *most, last = rank.params
    return torch.optim.SGD([last], lr=0.1), torch.optim.SGD(most, lr=0.1)


@every_way
def test_other_weights_that_were_updated_by_hand_are_refused_as_well(way):
    """The gradients of all were computed with them."""

    def body(rank):
        first, _ = two_optimizers(rank)
        found = own(rank)
        with torch.no_grad():
            rank.params[0].sub_(found[0])
        reduced(rank)
        first.step()

    refused(way, "LS101", body, moved=True)


@every_way
def test_an_addition_is_refused_by_the_optimizer_of_those_weights(way):
    def body(rank):
        first, second = two_optimizers(rank)
        after(rank, slice(None))
        rank.params[0].grad += own(rank)[0]
        first.step()
        second.step()

    refused(way, "LS101", body, moved=True)


@every_way
def test_a_change_between_two_that_were_asked_for_is_seen(way):
    """The second one is for a log, say."""

    def body(rank):
        found = own(rank)
        with torch.no_grad():
            rank.params[0].sub_(found[0])
        reduced(rank)
        own(rank)
        rank.optimizer.step()

    refused(way, "LS101", body, moved=True)


@every_way
def test_an_inner_loop_whose_weights_are_put_back(way):
    """Two steps of this rank's own inside no_sync; the model is then where it was."""

    def body(rank):
        seen = []
        for _ in range(2):
            rank.optimizer.zero_grad()
            start = [param.detach().clone() for param in rank.params]
            with rank.sync.no_sync():
                by_hand(rank)
                by_hand(rank)
            with torch.no_grad():
                for param, value in zip(rank.params, start, strict=True):
                    param.copy_(value)
            reduced(rank)
            seen.append(gradients(rank.plain))
            rank.optimizer.step()
        return [*seen, weights([rank.plain])]

    true, seen = built(), []
    optimizer = momentum(true)
    for _ in range(2):
        optimizer.zero_grad()
        mean_square(true).backward()
        seen.append(gradients(true))
        optimizer.step()
    assert_exact(on_ranks(way, body), [*seen, weights([true])])


class Growing(nn.Module):
    """A model that gets another layer later."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.extra = None

    def forward(self, x):
        out = self.inner(x)
        return out if self.extra is None else self.extra(out)


@every_way
@pytest.mark.parametrize("rows_of_last", [True, False], ids=["rows", "no rows"])
def test_a_layer_added_after_attaching_is_refused_when_backward_ends(way, rows_of_last):
    def body(rank):
        rank.plain.extra = nn.Linear(3, 3).double()
        if rank.number == 0 or rows_of_last:
            rank.sync.backward(mean_square(rank.model, PARTS[rank.number]), weight=1)
        else:
            rank.sync.reduce_pending()

    for error in refused(way, "LS102", body, build=Growing, moved=True):
        assert "extra.weight" in str(error)
    assert X.dtype is torch.float64
