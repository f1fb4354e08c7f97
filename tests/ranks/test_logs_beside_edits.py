# SPDX-License-Identifier: Apache-2.0
"""One rank asks ``torch.autograd.grad`` for its log, in a program that edits gradients by hand."""

import pytest
import torch

from harness import gradients
from lockstep.errors import MixedWeightsError
from ranks.test_replicate_exact import weights
from ranks.ways import assert_exact, built, mean_square, momentum, on_ranks, refused

PARTS = (slice(0, 8), slice(8, 12))
STEPS = 3


def on_gradients(params):
    for param in params:
        param.grad.add_(param.detach(), alpha=0.01)


def on_new_gradients(params):
    for param in params:
        param.grad = param.grad + 0.01 * param.detach()


def on_weights(params):
    for param in params:
        param.data.mul_(0.999)


def nothing(params):
    return


EDITS = {
    "gradients": (on_gradients, nothing),
    "new gradients": (on_new_gradients, nothing),
    "weights": (nothing, on_weights),
    "weights before": (on_weights, nothing),
    "both": (on_gradients, on_weights),
}
"""What a program does by hand between backward and step, and after the step."""


def own_norm(rank, which):
    """For TensorBoard: the norm of this rank's own gradient of one layer, or of all."""
    loss = mean_square(rank.plain, PARTS[rank.number])
    found = torch.autograd.grad(loss, rank.params[which])
    return torch.cat([gradient.flatten() for gradient in found]).norm().item()


def reduced(rank):
    rank.sync.backward(mean_square(rank.model, PARTS[rank.number]), weight=8 - 4 * rank.number)


# The server steps with rank 0's gradients: there no weight tells what another rank has changed.
WAYS = pytest.mark.parametrize("way", ["replicate", "ddp"])


@WAYS
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("which", [slice(0, 1), slice(None)], ids=["a layer", "all"])
def test_a_log_of_one_rank_alone_ends_no_run(way, edit, which):
    between, afterwards = edit

    def body(rank):
        seen, logged = [], []
        for _ in range(STEPS):
            rank.optimizer.zero_grad()
            if rank.number == 0:
                logged.append(own_norm(rank, which))
            rank.sync.backward(
                mean_square(rank.model, PARTS[rank.number]), weight=8 - 4 * rank.number
            )
            if rank.number == 0:
                logged.append(own_norm(rank, which))
            between(rank.params)
            seen.append(gradients(rank.plain))
            rank.optimizer.step()
            afterwards(rank.params)
        return [*seen, weights([rank.plain])]

    true, seen = built(), []
    optimizer, params = momentum(true), list(true.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        mean_square(true).backward()
        between(params)
        seen.append(gradients(true))
        optimizer.step()
        afterwards(params)
    assert_exact(on_ranks(way, body), [*seen, weights([true])])


def added(rank):
    """With a part that all ranks have alike."""
    found = torch.autograd.grad(mean_square(rank.plain, PARTS[rank.number]), rank.params)
    for param, gradient in zip(rank.params, found, strict=True):
        param.grad += gradient + 0.01 * param.detach()


def signs(rank):
    found = torch.autograd.grad(mean_square(rank.plain, PARTS[rank.number]), rank.params)
    for param, gradient in zip(rank.params, found, strict=True):
        param.grad += 0.1 * gradient.sign()


@WAYS
@pytest.mark.parametrize("use", [added, signs])
def test_what_ranks_make_of_their_own_is_refused_before_the_step(way, use):
    def body(rank):
        rank.optimizer.zero_grad()
        reduced(rank)
        use(rank)
        rank.optimizer.step()

    refused(way, "LS101", body)


@WAYS
def test_a_decay_of_a_ranks_own_is_refused_two_steps_later(way):
    """No rank can tell it from one that all ranks make alike; the ranks' weights tell it."""

    def body(rank):
        for _ in range(STEPS):
            rank.optimizer.zero_grad()
            reduced(rank)
            own_norm(rank, slice(None))
            for param in rank.params:
                param.grad += 0.01 * rank.number * param.detach()
            rank.optimizer.step()

    refused(way, "LS101", body, moved=True)


@WAYS
def test_a_question_outlives_a_refused_round(way):
    def body(rank):
        for step in range(STEPS):
            rank.optimizer.zero_grad()
            reduced(rank)
            if step == 0:
                own_norm(rank, slice(None))
                for param in rank.params:
                    param.grad += 0.01 * rank.number * param.detach()
            rank.optimizer.step()
            if step == 0:
                rank.optimizer.zero_grad()
                loss = mean_square(rank.model, PARTS[rank.number])
                weight = None if rank.number else 8
                with pytest.raises(MixedWeightsError):
                    rank.sync.backward(loss, weight=weight)

    refused(way, "LS101", body, moved=True)
