# SPDX-License-Identifier: Apache-2.0
"""A state that is taken while gradients wait for an optimizer holds them.

Workers are threads over real gloo. Their loops add up gradients by hand; an epoch has three
batches, so that windows of two begin in one epoch and end in the next.
"""

import logging

import pytest
import torch

import lockstep
from harness import reset
from lockstep.keys import BATCH_SIZE
from lockstep.operator import Options
from lockstep.worker import LoopRequest, WorkerSpec
from lockstep.worker.per_rank_state import add_every_rank
from ranks.table import run_workers
from ranks.table_operators import Plain, mlp, sgd

STEPS = 8


class StepsEverySecondBatch(Plain):
    def train_batch(self, batch, batch_info):
        loss = self.compute_loss(batch, batch_info)
        loss.backward()
        if self.global_step % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"train_loss": loss.item()}


class InALoopOfItsOwn(StepsEverySecondBatch):
    def train_epoch(self, iterator, info):
        for batch in iterator:
            self.train_batch(batch, info)
        return {}


class StepsBeforeTheNextBatch(Plain):
    def train_batch(self, batch, batch_info):
        if self.global_step:
            self.optimizer.step()
            self.optimizer.zero_grad()
        loss = self.compute_loss(batch, batch_info)
        loss.backward()
        return {"train_loss": loss.item()}


class OfItsOwnInPart(StepsEverySecondBatch):
    """The last layer is each worker's own."""

    def make(self):
        model = super().make()
        lockstep.local(model[-1])
        return model


class ReducesEverySecondBatch(StepsEverySecondBatch):
    def train_batch(self, batch, batch_info):
        if self.global_step % 2:
            return super().train_batch(batch, batch_info)
        with self.no_sync():
            self.compute_loss(batch, batch_info).backward()
        return {}


def on_workers(operator_cls, num_workers, body, **options):
    """What `body(worker)` returns on each worker."""
    spec = WorkerSpec(
        operator_cls,
        {"rows": 36, BATCH_SIZE: 12},
        num_workers,
        num_shards=num_workers,
        seed=0,
        options=Options(**options),
    )

    return run_workers(spec, body)


def train(worker, num_steps):
    worker.train(LoopRequest("train", num_steps, False, {}))


def state_after(num_steps):
    def body(worker):
        train(worker, num_steps)
        return worker.state_dict()

    return body


def weights(state):
    return torch.cat([value.flatten() for value in state["models"][0].values()])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "operator_cls", [StepsEverySecondBatch, InALoopOfItsOwn, StepsBeforeTheNextBatch]
)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_what_goes_on_from_it_ends_as_the_undisturbed_run(
    operator_cls, saved_by, loaded_by, num_steps
):
    expected = weights(on_workers(operator_cls, saved_by, state_after(STEPS))[0])
    state = on_workers(operator_cls, saved_by, state_after(num_steps))[0]

    def go_on(worker):
        worker.load_state(state)
        train(worker, STEPS - num_steps)
        return weights(worker.state_dict())

    for got in on_workers(operator_cls, loaded_by, go_on):
        torch.testing.assert_close(
            got, expected, rtol=0, atol=0 if saved_by == loaded_by else 1e-12
        )


@pytest.mark.parametrize("operator_cls", [StepsEverySecondBatch, OfItsOwnInPart])
def test_a_load_that_is_undone_leaves_them(operator_cls):
    def body(worker):
        train(worker, 3)
        worker.hold_state()
        worker.apply_state(worker.state_dict())
        worker.settle_state(keep=False)
        train(worker, STEPS - 3)
        return weights(worker.state_dict())

    expected = map(weights, on_workers(operator_cls, 2, state_after(STEPS)))
    for got, undisturbed in zip(on_workers(operator_cls, 2, body), expected, strict=True):
        assert torch.equal(got, undisturbed)


def test_those_of_parameters_that_are_no_worker_s_own_any_more_are_left_out():
    def own_state(worker):
        train(worker, 3)
        return worker.state_dict(), worker.per_rank_state()

    results = on_workers(OfItsOwnInPart, 2, own_state)
    state = add_every_rank(results[0][0], [own for _, own in results])

    def go_on(worker):
        worker.load_state(state)
        train(worker, 1)
        return weights(worker.state_dict())

    first, second = on_workers(StepsEverySecondBatch, 2, go_on)
    assert torch.equal(first, second)


def test_they_are_loaded_into_a_model_of_another_dtype():
    class Single(StepsEverySecondBatch):
        def build(self):
            model = reset(mlp(), 7).float()
            self.model, self.optimizer = self.register(models=model, optimizers=sgd(model))

        def output(self, batch):
            return self.model(batch[0].float())

    state = on_workers(StepsEverySecondBatch, 2, state_after(3))[0]
    expected = weights(on_workers(StepsEverySecondBatch, 2, state_after(STEPS))[0])

    def go_on(worker):
        worker.load_state(state)
        train(worker, STEPS - 3)
        return weights(worker.state_dict())

    for got in on_workers(Single, 2, go_on):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_steps", [4, 5])
def test_those_under_no_sync_are_named(num_steps, caplog):
    """Of a state that is taken, and not of a copy to which a call may go back."""
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        states = on_workers(ReducesEverySecondBatch, 2, state_after(num_steps))
    assert all("gradients" not in state for state in states)
    assert ("no_sync" in caplog.text) == (num_steps == 5)


def test_a_window_of_the_default_loop_is_begun_anew_and_leaves_nothing_out(caplog):
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        states = on_workers(Plain, 2, state_after(1), accumulate=2)
    assert [state["global_step"] for state in states] == [0, 0]
    assert caplog.text == ""
