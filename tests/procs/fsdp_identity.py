# SPDX-License-Identifier: Apache-2.0
"""Cases for `fsdp_ranks.py`: what a program does with its own parameters and optimizers.

Each trains beside one process in float64 and returns how far apart the weights are.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from tests.procs.fsdp_pairs import (
    Net,
    Pair,
    adam,
    gathered,
    lookahead,
    momentum,
    paired,
)
from tests.procs.odd_optimizers import (
    SAM,
    AssignsData,
    ByNorms,
    ChoosesByIdentity,
    EmptiesGradients,
    Lookahead,
    OfOldStyle,
    OfTwoKinds,
    ReadsParts,
    RemembersNorms,
    WritesToGradients,
    WritesToParts,
)
from torch import nn

from harness import reset
from lockstep.errors import PeerLostError
from lockstep.sync.fsdp import FSDPSync
from lockstep.sync.optimizer_inspection import (
    load_state,
    optimizers_with_state,
)
from lockstep.sync.parameter_shards import gather_whole
from lockstep.worker.state_dict import copy_own_rows
from ranks.programs import X, Y

# --------------------------------------------------------------------- the user's parameters


def listed_before_the_backward(group):
    """Clipped through a list that was made before `register`, and cloned at every moment."""
    model, truth = reset(Net(), 3), reset(Net(), 3)
    listed, true_listed = list(model.parameters()), list(truth.parameters())
    optimizer, true_optimizer = momentum(listed), momentum(true_listed)
    sync = FSDPSync([model], group, [optimizer])
    part = slice(0, 8) if group.rank == 0 else slice(8, 12)
    pair = Pair(model, optimizer, sync, truth, true_optimizer, part)

    def is_as_it_was():
        held = [p for options in optimizer.param_groups for p in options["params"]]
        assert all(a is b for a, b in zip(listed, model.parameters(), strict=True))
        assert all(a is b for a, b in zip(listed, held, strict=True))
        assert all(type(p) is nn.Parameter and p.grad_fn is None for p in listed)
        assert all(torch.equal(p.detach().clone(), p) for p in listed)
        assert set(map(id, optimizer.state)) <= set(map(id, listed))

    for _ in range(4):
        is_as_it_was()
        for each in pair.both():
            each[1].zero_grad()
        pair.backward()
        is_as_it_was()
        assert pair.gradients_apart() < 1e-12
        ours = nn.utils.clip_grad_norm_(listed, 0.1)
        theirs = nn.utils.clip_grad_norm_(true_listed, 0.1)
        assert abs(ours - theirs) < 1e-12 < theirs - 0.1
        pair.step()
        is_as_it_was()
        assert all(p.grad is not None for p in listed)
    return pair.apart()


def weights_changed_in_place(group):
    """Between backward and step, and after it; and bound to other memory."""
    pair = paired(group)
    for step in range(4):
        for _, optimizer in pair.both():
            optimizer.zero_grad()
        pair.backward()
        with torch.no_grad():
            for model, _ in pair.both():
                model.first.weight.mul_(0.9)
        pair.step()
        with torch.no_grad():
            for model, _ in pair.both():
                for param in model.parameters():
                    param.clamp_(-0.3, 0.3)
                    if step == 1:
                        param.data = param.data * 1.1
    return pair.apart()


def gradients_emptied(group):
    """Through the model and the optimizer, to None and to zeros; two backwards before a step."""
    pair = paired(group)
    for step in range(8):
        through_model, to_none = step % 2 == 0, step % 4 < 2
        for model, optimizer in pair.both():
            if through_model:
                model.zero_grad(set_to_none=to_none)
            else:
                optimizer.zero_grad(set_to_none=to_none)
        assert all((p.grad is None) == to_none for p in pair.model.parameters()) or step == 0
        pair.backward()
        pair.backward()
        assert pair.gradients_apart() < 1e-12
        pair.step()
    pair.backward()  # on top of what the last step has left
    pair.step()
    return pair.apart()


def frozen_and_unfrozen(group):
    pair = paired(group, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1))
    for frozen in (True, False, True, False):
        for model, optimizer in pair.both():
            model.first.requires_grad_(not frozen)
            optimizer.zero_grad()
        pair.train(2)
        assert (pair.model.first.weight.grad is None) == frozen
    return pair.apart()


def groups_added_and_a_scheduler(group):
    def make(params):
        params = list(params)
        optimizer = adam(params[:2])
        optimizer.rest = params[2:]
        return optimizer

    pair = paired(group, make)
    made = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for _, o in pair.both()]
    pair.train(2)
    for _, optimizer in pair.both():
        optimizer.add_param_group({"params": optimizer.rest, "lr": 0.02})
    for scheduler in made:
        scheduler.step()
    pair.train(2)
    return pair.apart()


# ------------------------------------------------------------------------------------- states


def state_there_and_back(group):
    """A state goes into a fresh run, and into one process, and back."""
    pair = paired(group, adam)
    pair.train(2)
    state = pair.optimizer.state_dict()
    full = copy.deepcopy(state)
    full["state"] = {
        number: {name: gather_whole(value) for name, value in own.items()}
        for number, own in state["state"].items()
    }
    moments = pair.optimizer.state[pair.model.first.weight]["exp_avg"]
    assert len(moments.to_local()) == (3 if group.rank == 0 else 2)
    weights = copy.deepcopy(pair.model.state_dict())
    pair.sync.detach()
    fresh = paired(group, adam)
    for model, optimizer in fresh.both():
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(full))
    loaded = fresh.optimizer.state[fresh.model.first.weight]["exp_avg"]
    assert len(loaded.to_local()) == (3 if group.rank == 0 else 2)
    fresh.train(2)
    fresh.optimizer.load_state_dict(fresh.optimizer.state_dict())
    fresh.train(2)
    return fresh.apart()


def stepped_before(group):
    """What an optimizer remembers already is shared out."""
    model, truth = reset(Net(), 3), reset(Net(), 3)
    made = []
    for each in (model, truth):
        optimizer = adam(each.parameters())
        ((each(X) - Y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        made.append(optimizer)
    sync = FSDPSync([model], group, made[:1])
    part = slice(0, 8) if group.rank == 0 else slice(8, 12)
    pair = Pair(model, made[0], sync, truth, made[1], part)
    pair.train()
    return pair.apart()


def stepped_before_within(group):
    """What an optimizer within another one remembers already is shared out."""
    model, truth = reset(Net(), 3), reset(Net(), 3)
    made = []
    for each in (model, truth):
        optimizer = lookahead(each.parameters())
        ((each(X) - Y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        made.append(optimizer)
    sync = FSDPSync([model], group, made[:1])
    part = slice(0, 8) if group.rank == 0 else slice(8, 12)
    pair = Pair(model, made[0], sync, truth, made[1], part)
    assert pair.inner_states_apart() == 0.0
    pair.train()
    moments = pair.optimizer.inner.state[model.first.weight]["exp_avg"]
    assert len(moments.to_local()) == (3 if group.rank == 0 else 2)
    return max(pair.apart(), pair.inner_states_apart())


def states_there_and_back(make, group):
    """Whole states, and rows as a checkpoint directory has them, go into a fresh run."""
    pair = paired(group, make)
    pair.train(3)
    made = optimizers_with_state([pair.optimizer])
    whole = [gathered(each.state_dict()) for each in made]
    rows = [copy_own_rows(each.state_dict()) for each in made]
    weights = copy.deepcopy(pair.model.state_dict())
    pair.sync.detach()
    found = 0.0
    for states in (whole, rows):
        fresh = paired(group, make)
        for model, _ in fresh.both():
            model.load_state_dict(weights)
        for optimizer, given in ((fresh.optimizer, states), (fresh.true_optimizer, whole)):
            for each, state in zip(optimizers_with_state([optimizer]), given, strict=True):
                load_state(each, copy.deepcopy(state))
        assert fresh.inner_states_apart() == 0.0
        fresh.train(3)
        found = max(found, fresh.apart(), fresh.inner_states_apart())
        fresh.sync.detach()
    return found


def states_within_there_and_back(group):
    return states_there_and_back(lookahead, group)


def norms_and_lists_there_and_back(group):
    """Each rank has a part of a norm, and its rows of what is in a list."""
    return states_there_and_back(RemembersNorms, group)


def steps_of_the_optimizer_within(group):
    """A loop calls them by itself, with whole parameters; so its state is whole."""
    pair = paired(group, lambda ps: SAM(ps, adam))
    for step in range(4):
        for name in ("first_step", "second_step"):
            pair.backward()
            for _, optimizer in pair.both():
                getattr(optimizer, name)()
        if step == 1:
            for _, optimizer in pair.both():
                load_state(optimizer.base, copy.deepcopy(optimizer.base.state_dict()))
    moments = pair.optimizer.base.state[pair.model.first.weight]["exp_avg"]
    assert type(moments) is torch.Tensor
    return max(pair.apart(), pair.inner_states_apart())


class Failing(torch.optim.Optimizer):
    """Raises in some steps: before it has done anything, or when it has done all."""

    fails = ""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        if self.fails == "before":
            raise ArithmeticError(self.fails)
        for options in self.param_groups:
            for param in options["params"]:
                param.add_(param.grad, alpha=-options["lr"])
                self.state[param]["seen"] = torch.zeros_like(param)
        if self.fails == "after":
            raise ArithmeticError(self.fails)


def a_step_that_raises(group):
    """Of what was done all ranks have the same, and what is held is what was held."""
    pair = paired(group, Failing)
    pair.train(1)
    held = [list(o["params"]) for o in pair.optimizer.param_groups]
    for fails in ("before", "after"):
        pair.optimizer.zero_grad()
        pair.true_optimizer.zero_grad()
        pair.backward()
        pair.optimizer.fails = pair.true_optimizer.fails = fails
        for _, optimizer in pair.both():
            try:
                optimizer.step()
            except ArithmeticError:
                continue
            raise AssertionError("it raises")
        pair.optimizer.fails = pair.true_optimizer.fails = ""
        now = [list(o["params"]) for o in pair.optimizer.param_groups]
        assert all(a is b for a, b in zip(held[0], now[0], strict=True))
        assert set(map(id, pair.optimizer.state)) == set(map(id, held[0]))
        assert pair.gradients_apart() < 1e-12
        assert pair.apart() < 1e-12
    pair.train(2)
    return pair.apart()


# --------------------------------------------------------------------------------- optimizers


OPTIMIZERS = {
    "Adam": adam,
    "AdamW in one kernel per list": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True),
    "Adam in one kernel": lambda ps: torch.optim.Adam(ps, lr=0.05, fused=True),
    "AMSGrad": lambda ps: torch.optim.Adam(ps, lr=0.05, amsgrad=True),
    "Nesterov in one kernel per list": lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.05),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.05),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.05),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.05),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.05, centered=True, momentum=0.5),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.05),
    "by norms": ByNorms,
    "of old style": OfOldStyle,
    "writes to gradients": WritesToGradients,
    "empties gradients": EmptiesGradients,
    "reads parts": ReadsParts,
    "chooses by identity": ChoosesByIdentity,
    "writes to columns": lambda ps: WritesToParts(ps, lambda t: t[..., :2] if t.dim() > 1 else t),
    "Lookahead": lookahead,
    "of two kinds": OfTwoKinds,
    "of two kinds with groups of their own": partial(OfTwoKinds, own_groups=True),
    "Lookahead of Adafactor": lambda ps: Lookahead(torch.optim.Adafactor(ps, lr=0.05)),
}


def every_optimizer(group):
    """By name: how far the weights, and what is left of the gradients, are apart."""
    found = {}
    for name, make in OPTIMIZERS.items():
        pair = paired(group, make)
        pair.train(4)
        grads = [[p.grad for p in m.parameters()] for m in (pair.model, pair.truth)]
        assert [g is None for g in grads[0]] == [g is None for g in grads[1]], name
        left = 0.0 if grads[0][0] is None else pair.gradients_apart()
        found[name] = max(pair.apart(), left, pair.inner_states_apart())
        pair.sync.detach()
    return found


CLOSURES = {
    "SGD": momentum,
    "Adam": adam,
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.5, max_iter=3),
}


def every_closure(group):
    found = {}
    for name, make in CLOSURES.items():
        pair = paired(group, make)
        x, y = X[pair.part], Y[pair.part]

        def of_ranks(pair=pair, x=x, y=y):
            held = pair.optimizer.param_groups[0]["params"]
            assert all(a is b for a, b in zip(held, pair.model.parameters(), strict=True))
            pair.optimizer.zero_grad()
            pair.sync.backward(((pair.model(x) - y) ** 2).mean(), weight=len(x))
            # The same on every rank, which its line search follows.
            return ((pair.model(X) - Y) ** 2).mean().detach()

        def of_one(pair=pair):
            pair.true_optimizer.zero_grad()
            loss = ((pair.truth(X) - Y) ** 2).mean()
            loss.backward()
            return loss

        for _ in range(3):
            pair.optimizer.step(of_ranks)
            pair.true_optimizer.step(of_one)
        found[name] = pair.apart()
        pair.sync.detach()
    return found


def with_a_scaler(group):
    pair = paired(group, adam)
    scaler, true_scaler = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    x, y = X[pair.part], Y[pair.part]
    for step in range(4):
        for _, optimizer in pair.both():
            optimizer.zero_grad()
        loss = ((pair.model(x) - y) ** 2).mean()
        pair.sync.backward(scaler.scale(loss), weight=len(x))
        true_scaler.scale(((pair.truth(X) - Y) ** 2).mean()).backward()
        if step == 2:
            for model, _ in pair.both():
                model.first.weight.grad[0, 0] = torch.inf
        for each, (model, optimizer) in zip((scaler, true_scaler), pair.both(), strict=True):
            each.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            each.step(optimizer)
            each.update()
    assert scaler.get_scale() == true_scaler.get_scale() == 4.0
    return pair.apart()


def data_assigned_in_a_step(group):
    pair = paired(group, AssignsData)
    pair.train(1)


def a_step_that_one_rank_leaves_out(group):
    pair = paired(group)
    pair.train(1)
    pair.backward()
    before = [param.detach().clone() for param in pair.model.parameters()]
    if group.rank == 1:
        group.close()  # as its end would
        return {"came": False}
    try:
        pair.optimizer.step()
    except PeerLostError as error:
        pairs = zip(before, pair.model.parameters(), strict=True)
        return {"said": error.what, "same": all(torch.equal(a, b) for a, b in pairs)}


def a_step_of_one_rank_alone(group):
    """Its peers go on to the next backward."""
    pair = paired(group)
    pair.backward()
    if group.rank == 0:
        pair.optimizer.step()
    pair.backward()


def steps_in_another_order(group):
    one, other = reset(Net(), 3), reset(Net(), 4)
    optimizers = [momentum(one.parameters()), momentum(other.parameters())]
    sync = FSDPSync([one, other], group, optimizers)
    sync.backward(((one(X) + other(X) - Y) ** 2).mean(), weight=1)
    optimizers[group.rank].step()


def given_back(group):
    """After `detach` an optimizer steps as ever, and holds what it held."""
    pair = paired(group, lambda ps: torch.optim.SGD(ps, lr=0.1))
    pair.train(1)
    pair.sync.detach()
    assert "step" not in vars(pair.optimizer)
    for model, optimizer in pair.both():
        optimizer.zero_grad()
        ((model(X) - Y) ** 2).mean().backward()
    pair.step()
    return pair.apart()


SAME = [
    listed_before_the_backward,
    weights_changed_in_place,
    gradients_emptied,
    frozen_and_unfrozen,
    groups_added_and_a_scheduler,
    state_there_and_back,
    stepped_before,
    stepped_before_within,
    states_within_there_and_back,
    norms_and_lists_there_and_back,
    steps_of_the_optimizer_within,
    a_step_that_raises,
    with_a_scaler,
    given_back,
]

SAME_BY_NAME = {every_optimizer: OPTIMIZERS, every_closure: CLOSURES}

CODES = {
    data_assigned_in_a_step: "LS003",
    steps_in_another_order: "LS101",
    a_step_of_one_rank_alone: "LS101",
}

CASES = [*SAME, *SAME_BY_NAME, *CODES, a_step_that_one_rank_leaves_out]
