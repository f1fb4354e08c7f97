# SPDX-License-Identifier: Apache-2.0
"""An optimizer never steps with gradients of one rank alone."""

import pytest
import torch
from torch import nn

import lockstep
from harness import assert_equal_on_all_ranks, assert_same, gradients, reset, rows, run_ranks
from lockstep.errors import GradientNotReducedError, UnknownParameterError, WrongTypeError
from lockstep.sync import GradientSync, is_local, local, replicate

X = rows(8, 4, seed=1)


def replicas_of(count, build=lambda: nn.Linear(4, 3)):
    return [reset(build(), seed=3) for _ in range(count)]


def on_two_ranks(body, build=lambda: nn.Linear(4, 3)):
    replicas = replicas_of(2, build)

    def one(group):
        model = replicas[group.rank]
        sync = replicate(model, group=group)
        try:
            return body(group, model, sync)
        finally:
            sync.detach()

    return run_ranks(2, one)


def with_a_local_layer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    local(model[1])
    return model


def test_gradients_assigned_by_hand_are_refused_by_name():
    def body(group, model, sync):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        found = torch.autograd.grad(model(X).mean(), list(model.parameters()))
        for param, grad in zip(model.parameters(), found, strict=True):
            param.grad = grad
        with pytest.raises(GradientNotReducedError, match=r"rank \d of 2, step 1(.|\n)*`weight`"):
            optimizer.step()
        assert torch.equal(model.weight, before)

    on_two_ranks(body)


def test_by_hand_is_refused_although_another_model_was_reduced():
    def body(group, model, sync):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0](X).mean().backward()
        model[1].weight.grad = torch.full_like(model[1].weight, group.rank)
        with pytest.raises(GradientNotReducedError, match=r"`1\.weight`"):
            optimizer.step()

    on_two_ranks(body, lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))


def test_only_no_sync_backwards_are_refused():
    def body(group, model, sync):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sync.no_sync():
            model(X).mean().backward()
        with pytest.raises(GradientNotReducedError, match="no_sync"):
            optimizer.step()

    on_two_ranks(body)


def test_one_reduced_gradient_may_be_stepped_with_twice():
    def body(group, model, sync):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X[: 4 + 4 * group.rank]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        before = model.weight.detach().clone()
        optimizer.step()
        optimizer.step()
        assert_same({"weight": before - 0.2 * model.weight.grad}, {"weight": model.weight.detach()})
        return gradients(model)

    assert_equal_on_all_ranks(on_two_ranks(body))


def test_what_happens_after_the_reduction_is_the_users_right():
    def body(group, model, sync):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        for param in model.parameters():
            param.grad = param.grad * 0.5 + 1.0
        optimizer.step()
        optimizer.zero_grad()
        model(X).mean().backward()
        for param in model.parameters():
            param.grad.add_(torch.ones_like(param))
        optimizer.step()

    on_two_ranks(body)


def test_a_rank_without_any_gradient_joins_before_its_step():
    def body(group, model, sync):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            if group.rank == 0:
                sync.backward(model(X).square().mean(), weight=8)
            optimizer.step()
        return gradients(model)

    (true,) = replicas_of(1)
    optimizer = torch.optim.SGD(true.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        true(X).square().mean().backward()
        optimizer.step()
    for got in on_two_ranks(body):
        assert_same(got, gradients(true))


def test_closures_are_checked_after_each_evaluation():
    def body(group, model, sync):
        mine = X[:4] if group.rank else X[4:]
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = model(mine).square().mean()
            loss.backward()
            whole = loss.detach().clone()
            group.all_reduce(whole).wait()
            return whole / 2

        optimizer.step(closure)
        after = {"weight": model.weight.detach().clone()}

        def by_hand():
            optimizer.zero_grad()
            loss = model(mine).square().mean()
            (model.weight.grad,) = torch.autograd.grad(loss, [model.weight])
            return loss

        with pytest.raises(GradientNotReducedError):
            optimizer.step(by_hand)
        with pytest.raises(GradientNotReducedError):
            torch.optim.SGD(model.parameters(), lr=0.1).step(closure=by_hand)
        return after

    (true,) = replicas_of(1)
    optimizer = torch.optim.LBFGS(true.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = true(X).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    for got in on_two_ranks(body):
        assert_same(got, {"weight": true.weight.detach()}, tolerance=1e-9)


def test_what_an_optimizer_of_the_users_takes_is_no_closure():
    class Scheduled(torch.optim.SGD):
        def step(self, epoch):
            self.epoch = epoch
            super().step()

    def body(group, model, sync):
        optimizer = Scheduled(model.parameters(), lr=0.1)
        (model.weight.grad,) = torch.autograd.grad(model(X).sum(), [model.weight])
        with pytest.raises(GradientNotReducedError):
            optimizer.step(3)
        sync.backward(model(X).sum(), weight=1)
        optimizer.step(3)
        return {"epoch": torch.tensor(optimizer.epoch)}

    for result in on_two_ranks(body):
        assert result["epoch"] == 3


def test_lbfgs_with_a_loss_of_each_ranks_own_is_refused_on_all():
    """Its line search would take the ranks to different points."""

    def body(group, model, sync):
        mine = X[:4] if group.rank else X[4:]
        optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = model(mine).square().mean()
            loss.backward()
            return loss

        with pytest.raises(GradientNotReducedError, match=r"(?s)on rank 1.*global_mean"):
            optimizer.step(closure)

    on_two_ranks(body)


def test_lbfgs_follows_the_mean_over_all_rows_that_its_refusal_advises():
    """The ranks have 3 rows and 5: the mean of their means is another objective."""

    def losses(model, part):
        return model(part).square().mean(dim=1)

    def body(group, model, sync):
        mine = X[:3] if group.rank else X[3:]
        optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = lockstep.global_mean(losses(model, mine), group=group)
            loss.backward()
            return loss

        optimizer.step(closure)
        return {"weight": model.weight.detach().clone()}

    (true,) = replicas_of(1)
    optimizer = torch.optim.LBFGS(true.parameters(), line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = losses(true, X).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    for got in on_two_ranks(body):
        assert_same(got, {"weight": true.weight.detach()}, tolerance=1e-9)


def test_a_parameter_that_nobody_knows_is_refused_and_a_local_one_is_not():
    def body(group, model, sync):
        stranger = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = torch.optim.SGD([*model.parameters(), stranger], lr=0.1)
        (model(X) * stranger).mean().backward()
        with pytest.raises(UnknownParameterError, match=r"param_groups\[0\]\[2\]"):
            optimizer.step()
        mine = local(nn.Parameter(torch.ones(3, dtype=torch.float64) * group.rank))
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        other.add_param_group({"params": [mine]})
        model.zero_grad()
        (model(X) * mine).mean().backward()
        other.step()

    on_two_ranks(body)


@pytest.mark.parametrize("is_marked", [False, True])
def test_an_optimizer_that_nobody_synchronises_is_told_of_once(caplog, is_marked):
    def body(group, model, sync):
        mine = nn.Parameter(torch.ones(3))
        if is_marked:
            local(mine)
        mine.grad = torch.ones(3)
        optimizer = torch.optim.SGD([mine], lr=0.1)
        optimizer.step()
        optimizer.step()
        replicate(reset(nn.Linear(2, 2), seed=1), group=group).detach()
        optimizer.step()

    on_two_ranks(body)
    said = [one.message for one in caplog.records if "that nobody synchronises" in one.message]
    assert len(said) == (0 if is_marked else 2), "once on each rank"


class Centred(torch.optim.SGD):
    """Torch hooks its step, and that of its base as soon as there is another plain SGD."""

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.grad = param.grad - param.grad.mean()
        return super().step(closure)


def test_a_step_within_the_step_of_a_subclass_is_one_step():
    def body(group, model, sync):
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer = Centred(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(X[group.rank :: 2]).square().mean().backward()
            optimizer.step()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    plain = reset(nn.Linear(4, 3), seed=3)
    optimizer = Centred(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(X).square().mean().backward()
        optimizer.step()
    for weights in on_two_ranks(body):
        assert_same(weights, dict(plain.named_parameters()))


@pytest.mark.parametrize("clips_all", [True, False])
def test_a_norm_that_counts_local_parameters_is_refused(clips_all):
    """It is another one on each rank, and would scale the shared gradients apart."""

    def body(group, model, sync):
        shared = [param for param in model.parameters() if not is_local(param)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X[group.rank :: 2]).square().mean().backward()
        clipped = list(model.parameters()) if clips_all else shared
        nn.utils.clip_grad_norm_(clipped, 1e-3)
        if not clips_all:
            optimizer.step()
            return
        with pytest.raises(GradientNotReducedError, match="norm that counts local parameters"):
            optimizer.step()

    on_two_ranks(body, with_a_local_layer)


def test_a_log_by_one_rank_before_a_clip_holds_nobody_up():
    """The clipped step compares gradients anyway, and the log's trace is forgotten in it."""

    def body(group, model, sync):
        shared = [param for param in model.parameters() if not is_local(param)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(X[group.rank :: 2]).square().mean().backward()
            if group.rank == 0 and step == 0:
                torch.autograd.grad(model(X).mean(), shared)
            if step == 0:
                nn.utils.clip_grad_norm_(shared, 1e-3)
            optimizer.step()

    on_two_ranks(body, with_a_local_layer)


def test_a_log_by_one_rank_beside_a_target_network_holds_nobody_up():
    def body(group, model, sync):
        critic, target = model
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            critic(X).mean().backward()
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                    old.lerp_(new, 0.1)
            if group.rank == 0 and step == 0:
                torch.autograd.grad(critic(X).mean(), list(critic.parameters()))

    on_two_ranks(body, lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3)))


@pytest.mark.parametrize("weight", [4, 1])
def test_a_weight_that_reaches_tensors_outside_is_told(weight, caplog):
    def body(group, model, sync):
        between = model(X).detach().requires_grad_(True)
        head = nn.Linear(3, 1).double()
        sync.backward(model(X).mean() + head(between).mean(), weight=weight)

    on_two_ranks(body)
    said = [one.message for one in caplog.records if "outside of the synchronised" in one.message]
    assert len(said) == (0 if weight == 1 else 2), "once on each rank, where it changes anything"
    assert all("3 tensors" in one for one in said)


def assigned(model):
    model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    )


def overwritten(model):
    """As ``torch.__future__.set_overwrite_module_params_on_conversion`` does, past every hook."""
    for layer in model:
        for name, param in layer.named_parameters():
            layer._parameters[name] = nn.Parameter(param.detach().clone())


def new_head(model):
    model.requires_grad_(False)
    model[1] = nn.Linear(3, 3).double()


@pytest.mark.parametrize("change", [assigned, overwritten, new_head])
def test_an_optimizer_of_late_parameters_alone_is_refused(change):
    """Its backward reaches no parameter that was there when `replicate` looked."""

    def body(group, model, sync):
        change(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(X[group.rank :: 2]).square().mean().backward()
        with pytest.raises(UnknownParameterError, match=r"param_groups\[0\]\[0\]"):
            optimizer.step()

    on_two_ranks(body, lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)))


def test_a_weight_that_one_sync_alone_knows_is_refused_by_the_other():
    def body(group, model, sync):
        (head,) = replicas_of(1, lambda: nn.Linear(3, 2))
        second = replicate(head, group=group)
        try:
            part = X[:5] if group.rank == 0 else X[5:]
            head(model(part)).square().mean().backward()
            with pytest.raises(GradientNotReducedError, match="one replicate"):
                sync.backward(head(model(part)).square().mean(), weight=len(part))
        finally:
            second.detach()

    on_two_ranks(body)


def test_a_rank_alone_may_assign_by_hand():
    (model,) = replicas_of(1)
    sync = replicate(model)
    model.weight.grad = torch.ones_like(model.weight)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    sync.detach()


def test_the_hook_goes_with_the_last_sync():
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    first, second = (replicate(model) for model in replicas_of(2))
    assert len(hooks) == before + 1
    first.detach()
    assert len(hooks) == before + 1
    second.detach()
    second.detach()
    assert len(hooks) == before


def test_a_frozen_parameter_of_whole_numbers_beside_a_log_is_stepped_over():
    def body(group, model, sync):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(X[group.rank :: 2]).square().mean()
        torch.autograd.grad(loss, model.weight, retain_graph=True)
        sync.backward(loss, weight=4)
        optimizer.step()

    class Quantised(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            codes = torch.ones(3, dtype=torch.int8)
            self.codes = nn.Parameter(codes, requires_grad=False)

    on_two_ranks(body, Quantised)


@pytest.mark.parametrize(
    ("given", "fix"),
    [(0, "reduce_pending"), ({"loss": 1.0}, r"keys \['loss'\](.|\n)*out\['loss'\]")],
)
def test_a_loss_that_is_no_tensor_is_refused(given, fix):
    def body(group, model, sync):
        with pytest.raises(WrongTypeError, match=rf"no tensor(.|\n)*{fix}"):
            sync.backward(given, weight=4)

    on_two_ranks(body)


def test_weights_loaded_on_one_rank_before_the_first_step_are_refused():
    """Of a sync whose group is the program's own: a trainer compares them after `setup`."""

    def body(group):
        model = reset(nn.Linear(4, 3), seed=3)
        sync = GradientSync([model], group, owns_group=True)
        with torch.no_grad():
            model.weight.add_(group.rank)
        with pytest.raises(GradientNotReducedError, match="a first round with other weights"):
            model(X).mean().backward()
        sync.detach()

    run_ranks(2, body)


def test_weights_that_all_ranks_change_alike_before_the_first_step_are_not_refused():
    def body(group):
        model = reset(nn.Linear(4, 3), seed=3)
        sync = GradientSync([model], group, owns_group=True)
        with torch.no_grad():
            model.weight.add_(1.0)
        for _ in range(2):
            model(X[group.rank :: 2]).mean().backward()
            with torch.no_grad():
                model.weight.add_(group.rank)  # a later round does not look
        sync.detach()

    run_ranks(2, body)
