# SPDX-License-Identifier: Apache-2.0
"""A store whose workers died takes back the steps that no worker which is left has counted."""

import copy
import pickle

import pytest
import torch
from tests.procs.odd_optimizers import Lookahead
from torch import nn

from lockstep.errors import ReplicasDifferError
from lockstep.randomness import RandomState
from lockstep.sync.optimizer_inspection import inner_optimizers
from lockstep.sync.parameter_server.messages import Message, OptimizerRequest
from lockstep.sync.parameter_server.parameter_store import ParameterStore
from lockstep.sync.parameter_server.remote_optimizer import pickle_optimizers


class Counting(torch.optim.Optimizer):
    """Counts where no state is: on itself, in its groups, and in one tensor for all."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.taken = [0]

    def step(self, closure=None):
        self.taken[0] += 1
        self.scale = getattr(self, "scale", 1.0) * 0.5
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            shared = self.state.setdefault("shared", torch.zeros(()))
            for param in group["params"]:
                shared += 1
                self.state[param]["shared"] = shared
                with torch.no_grad():
                    rate = group["lr"] * self.scale / (self.taken[0] + group["seen"] + shared)
                    param -= rate * param.grad


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "counting": lambda params: Counting(params, lr=0.1),
    "lookahead": lambda params: Lookahead(torch.optim.Adam(params, lr=0.1)),
    "lookahead of counting": lambda params: Lookahead(Counting(params, lr=0.1)),
}


class Run:
    """The workers of a store, and their requests; parameter 1 belongs to every optimizer."""

    def __init__(self, make, num_optimizers=1, size=2):
        self.parameters = {
            number: nn.Parameter(torch.linspace(-1, 1, 3 + number)) for number in range(3)
        }
        self.numbers = [[0, 1], [2, 1]][:num_optimizers]
        self.groups = []
        optimizers = []
        for numbers in self.numbers:
            optimizers.append(make([self.parameters[number] for number in numbers]))
            (group,) = optimizers[-1].param_groups
            settings = {name: value for name, value in group.items() if name != "params"}
            self.groups.append([(settings, numbers)])
        self.store, self.size = ParameterStore(size), size
        self.pickle_optimizers = pickle_optimizers(optimizers, self.parameters)
        self.attach(self.pickle_optimizers)

    def attach(self, body):
        for rank in range(1, self.size):
            assert self.store.handle(rank, Message("attach")) == {}
        return self.alone(Message("attach", body))

    def alone(self, message):
        answer = self.store.handle(0, message)[0]
        if answer.kind == "error":
            raise pickle.loads(answer.body)
        return answer

    def request(self, what, optimizer, point, **about):
        groups = self.groups[optimizer]
        return Message(what, OptimizerRequest(optimizer, groups, undo_point=point, **about))

    def step(self, point, seed, optimizer=0):
        generator = torch.Generator().manual_seed(seed)
        answers = {}
        for rank in range(self.size):
            request = self.request("step", optimizer, point, with_gradient=self.numbers[optimizer])
            if rank == 0:
                request.tensors = [
                    torch.randn(3 + number, generator=generator)
                    for number in self.numbers[optimizer]
                ]
            answers = self.store.handle(rank, request)
        assert [answer.kind for answer in answers.values()] == ["done"] * self.size

    def load(self, state, point):
        self.alone(self.request("load_state_dict", 0, point, state=state))

    def state(self, optimizer=0, inner=None):
        asked = self.request("state_dict", optimizer, None, inner=inner)
        return copy.deepcopy(self.alone(asked).body)

    def num_inner(self, optimizer):
        return len(inner_optimizers(self.store._optimizers[optimizer]))

    def weights(self):
        return [param.detach().clone() for param in self.store._parameters.values()]

    def regrouped(self, committed, size=1):
        self.store, self.size = self.store.make_successor(size), size
        answer = self.attach(committed)
        numbers, *_ = answer.body
        for number, weight in zip(numbers, answer.tensors, strict=True):
            assert torch.equal(weight, self.store._parameters[number])


def assert_same_bits(run, other):
    for mine, theirs in zip(run.weights(), other.weights(), strict=True):
        assert torch.equal(mine, theirs)
    for optimizer in range(len(run.numbers)):
        for inner in (None, *range(run.num_inner(optimizer))):
            _same(run.state(optimizer, inner), other.state(optimizer, inner))


def _same(mine, theirs):
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            _same(mine[key], value)
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(mine, theirs)
    else:
        assert mine == theirs


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_that_nobody_counted_is_taken_again(make, before):
    disturbed, undisturbed = Run(make), Run(make)
    for run in (disturbed, undisturbed):
        for step in range(before):
            run.step(step, seed=step)
    disturbed.step(before, seed=99)
    disturbed.regrouped(before)
    assert_same_bits(disturbed, undisturbed)
    for run in (disturbed, undisturbed):
        for step in range(before, before + 3):
            run.step(step, seed=step)
    assert_same_bits(disturbed, undisturbed)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_step_that_somebody_counted_stays(make):
    disturbed, undisturbed = Run(make), Run(make)
    for run in (disturbed, undisturbed):
        run.step(0, seed=0)
        run.step(1, seed=1)
    disturbed.regrouped(2, size=3)
    # Once more: somebody died while that generation formed.
    disturbed.regrouped(2)
    for run in (disturbed, undisturbed):
        run.step(2, seed=2)
    assert_same_bits(disturbed, undisturbed)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("stepped", [[0], [0, 1], [1, 0, 1]])
def test_whatever_of_two_optimizers_has_stepped_goes_back(make, stepped):
    disturbed, undisturbed = Run(make, 2), Run(make, 2)
    for run in (disturbed, undisturbed):
        for step in range(2):
            run.step(step, seed=step, optimizer=0)
            run.step(step, seed=step + 10, optimizer=1)
    for number, optimizer in enumerate(stepped):
        disturbed.step(2, seed=number + 90, optimizer=optimizer)
    disturbed.regrouped(2)
    assert_same_bits(disturbed, undisturbed)


def test_a_window_goes_back_to_its_beginning():
    """Several batches, each with a step, of which the first says where the run would go on."""
    disturbed, undisturbed = Run(OPTIMIZERS["adam"]), Run(OPTIMIZERS["adam"])
    for run in (disturbed, undisturbed):
        run.step(0, seed=0)
    for seed in (97, 98, 99):
        disturbed.step(1, seed=seed)
    disturbed.regrouped(1)
    assert_same_bits(disturbed, undisturbed)


def test_a_state_that_was_loaded_between_steps_stays():
    run = Run(OPTIMIZERS["adam"])
    run.step(0, seed=0)
    early = run.state()
    run.step(7, seed=1)
    run.load(early, None)
    # The run goes on from an earlier step than the one that was made last.
    run.regrouped(1)
    _same(run.state(), early)


def test_a_state_that_a_loop_loads_in_a_step_goes_back_with_it():
    disturbed, undisturbed = Run(OPTIMIZERS["adam"]), Run(OPTIMIZERS["adam"])
    early = disturbed.state()
    for run in (disturbed, undisturbed):
        run.step(0, seed=0)
    disturbed.load(early, 1)
    disturbed.step(1, seed=1)
    disturbed.regrouped(1)
    assert_same_bits(disturbed, undisturbed)


def test_what_nobody_comes_back_to_is_not_copied():
    run = Run(OPTIMIZERS["adam"])
    run.step(0, seed=0)
    run.step(None, seed=1)
    after = run.weights()
    assert run.store._undo_log._kept == []
    run.regrouped(0)
    assert all(map(torch.equal, run.weights(), after))


def test_copies_use_their_memory_again():
    run = Run(OPTIMIZERS["adam"])
    places = []
    for step in range(4):
        run.step(step, seed=step)
        (kept,) = run.store._undo_log._kept
        places.append([tensor.data_ptr() for tensor in kept._tensors])
    assert places[1] == places[2] == places[3]


def test_workers_that_are_left_further_behind_than_was_kept():
    run = Run(OPTIMIZERS["sgd"])
    run.step(0, seed=0)
    run.step(4, seed=1)
    with pytest.raises(ReplicasDifferError, match="gone on further") as caught:
        run.regrouped(3)
    assert "step 4" in str(caught.value)


@pytest.mark.parametrize("is_first", [True, False], ids=["first generation", "another one"])
def test_who_comes_too_early_is_answered_when_rank_0_has_come(is_first):
    run = Run(OPTIMIZERS["sgd"])
    store, body = ParameterStore(2), run.pickle_optimizers
    if not is_first:
        store, body = run.store.make_successor(2), 0
    assert store.handle(1, Message("attach")) == {}
    assert not store.is_idle
    answers = store.handle(0, Message("attach", body))
    assert [answers[rank].kind for rank in (0, 1)] == ["done", "done"]
    assert store.is_idle
    asked = Message("state_dict", OptimizerRequest(0, run.groups[0]))
    assert store.handle(1, asked)[1].kind == "done"


def test_who_comes_after_rank_0_has_left_is_refused():
    store = ParameterStore(2)
    store.leave(0)
    assert store.handle(1, Message("attach"))[1].kind == "error"
    assert store.is_idle


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param) * 0.1)


def test_a_step_draws_at_the_server_what_it_would_draw_at_rank_0():
    """Whatever the server's own generators have drawn before; they stay where they were."""
    run = Run(lambda params: Noisy(params, lr=0.1))
    held = [run.parameters[number] for number in run.numbers[0]]
    answers = []
    for seed in (1, 2):
        torch.manual_seed(7)
        here = RandomState.capture_host()
        torch.manual_seed(seed)
        run.attach(run.pickle_optimizers)
        for rank in (1, 0):
            request = run.request("step", 0, None, with_gradient=run.numbers[0])
            if rank == 0:
                request.tensors = [torch.ones_like(each) for each in held]
                request.body.random_state = here
            answer = run.store.handle(rank, request)
        answers.append(answer[0].tensors)
        assert torch.equal(
            torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed))
        )
    torch.manual_seed(7)
    for param in held:
        param.grad = torch.ones_like(param)
    Noisy(held, lr=0.1).step()
    for one, other, expected in zip(*answers, held, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, expected)
