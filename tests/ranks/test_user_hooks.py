# SPDX-License-Identifier: Apache-2.0
"""Hooks of the user's on a parameter see the gradient of the global batch, as in one process."""

import pytest
import torch

from harness import assert_same, gradients
from lockstep.errors import GradientNotReducedError
from ranks.programs import mlp
from ranks.table import cells, pairwise
from ranks.test_replicate_exact import weights
from ranks.ways import (
    WAYS,
    assert_exact,
    built,
    every_way,
    mean_square,
    momentum,
    on_ranks,
    our_buckets,
)

SPLITS = {
    "one worker": (slice(0, 7),),
    "two": (slice(0, 8), slice(8, 12)),
    "one without rows": (slice(0, 12), slice(12, 12)),
    "three": (slice(0, 2), slice(2, 11), slice(11, 12)),
}


def replace_after(param):
    def hook(reached):
        reached.grad = reached.grad * 2 + 0.1 * reached.detach()

    return param.register_post_accumulate_grad_hook(hook)


def change_after(param):
    def hook(reached):
        reached.grad.mul_(2).add_(reached.detach(), alpha=0.1)

    return param.register_post_accumulate_grad_hook(hook)


def decay(param):
    return param.register_hook(lambda gradient: gradient + 0.1 * param.detach())


def clamp(param):
    return param.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


def in_place(param):
    def hook(gradient):
        gradient.clamp_(-0.02, 0.02)

    return param.register_hook(hook)


def nothing(param):
    return None


HOOKS = (replace_after, change_after, decay, clamp, in_place)


def on_all(hook):
    return lambda plain: [hook(param) for param in plain.parameters()]


def train(rank, split):
    """Three steps; a rank without rows follows."""
    part, seen = SPLITS[split][rank.number], []
    # What a full batch weighs is known; the last one of an epoch is smaller.
    rank.sync.expect_weight(8)
    for _ in range(3):
        rank.optimizer.zero_grad()
        if part.start == part.stop:
            rank.sync.reduce_pending()
        else:
            loss = mean_square(rank.model, part)
            rank.sync.backward(loss, weight=part.stop - part.start)
        seen.append(gradients(rank.plain))
        rank.optimizer.step()
    return [*seen, weights([rank.plain])]


def one_process(hook, split):
    true, seen = built(), []
    optimizer = momentum(true)
    on_all(hook)(true)
    for _ in range(3):
        optimizer.zero_grad()
        mean_square(true, slice(0, SPLITS[split][-1].stop)).backward()
        seen.append(gradients(true))
        optimizer.step()
    return [*seen, weights([true])]


AXES = (WAYS, tuple(SPLITS), HOOKS, ("before", "after"), (25, 1e-4))
QUICK = pairwise(*AXES)


@pytest.mark.parametrize(
    ("way", "split", "hook", "when", "cap_mb"),
    [
        pytest.param(*cell, marks=[] if cell in QUICK else [pytest.mark.slow])
        for cell in cells(*AXES)
    ],
)
def test_a_hook_sees_the_whole_gradient(way, split, hook, when, cap_mb):
    first, later = (hook, nothing) if when == "before" else (nothing, hook)

    def body(rank):
        on_all(later)(rank.plain)
        return train(rank, split)

    size = len(SPLITS[split])
    results = on_ranks(way, body, size=size, before=on_all(first), bucket_cap_mb=cap_mb)
    assert_exact(results, one_process(hook, split))


@every_way
@pytest.mark.parametrize("hook", [decay, clamp])
def test_plain_backwards_of_batches_of_unequal_size(way, hook):
    def body(rank):
        seen = []
        part = SPLITS["two"][rank.number]
        for _ in range(2):
            rank.optimizer.zero_grad()
            rank.sync.set_delivered_weight(part.stop - part.start)
            mean_square(rank.model, part).backward()
            seen.append(gradients(rank.plain))
            rank.optimizer.step()
        return seen

    true = one_process(hook, "two")
    assert_exact(on_ranks(way, body, before=on_all(hook)), true[:2])


@every_way
@pytest.mark.parametrize("when", ["before", "after"])
def test_autograd_grad_returns_what_hooks_make_of_it(way, when):
    def body(rank):
        if when == "after":
            on_all(decay)(rank.plain)
        params = rank.params
        loss = mean_square(rank.plain, SPLITS["two"][rank.number])
        return dict(enumerate(torch.autograd.grad(loss, params)))

    before = on_all(decay if when == "before" else nothing)
    for number, got in enumerate(on_ranks(way, body, before=before)):
        true = built()
        on_all(decay)(true)
        loss = mean_square(true, SPLITS["two"][number])
        assert_same(got, dict(enumerate(torch.autograd.grad(loss, list(true.parameters())))))


class Calls:
    """Hooks of both kinds that count how often they run and double the gradient."""

    def __init__(self):
        self.seen = 0

    def on(self, param):
        def before(gradient):
            self.seen += 1
            return gradient * 2

        def after(reached):
            self.seen += 1
            reached.grad.mul_(2)

        handles = (param.register_hook(before), param.register_post_accumulate_grad_hook(after))
        return lambda: [handle.remove() for handle in handles]


def gradient_of(rank, *, alone):
    """What one backward leaves in the first weight: of all ranks' rows, or of this one's."""
    part = SPLITS["two"][rank.number]
    for param in rank.params:
        param.grad = None
    if alone:
        mean_square(rank.plain, part).backward()
    else:
        rank.sync.backward(mean_square(rank.model, part), weight=part.stop - part.start)
    return {"weight": rank.plain[0].weight.grad.clone()}


def true_gradient(part, factor):
    true = built()
    mean_square(true, part).backward()
    return {"weight": true[0].weight.grad * factor}


def hooked(way, registered, body):
    """``body(rank, calls, remove)``, with hooks from before or after attaching."""
    early = {}

    def on(plain):
        return (calls := Calls()), calls.on(plain[0].weight)

    def before(plain):
        early[id(plain)] = on(plain) if registered == "before" else None

    def one_rank(rank):
        return body(rank, *(early[id(rank.plain)] or on(rank.plain)))

    return on_ranks(way, one_rank, before=before)


@every_way
@pytest.mark.parametrize("registered", ["before", "after"])
def test_handles_remove_their_hooks_before_detaching(way, registered):
    def body(rank, calls, remove):
        whole = [gradient_of(rank, alone=False)]
        remove()
        whole.append(gradient_of(rank, alone=False))
        rank.sync.detach()
        own = gradient_of(rank, alone=True)
        assert calls.seen == 2
        return whole, own

    results = hooked(way, registered, body)
    expected = [true_gradient(slice(None), 4), true_gradient(slice(None), 1)]
    assert_exact([whole for whole, _ in results], expected)
    for number, (_, own) in enumerate(results):
        assert_same(own, true_gradient(SPLITS["two"][number], 1))


@every_way
@pytest.mark.parametrize("registered", ["before", "after"])
def test_hooks_run_after_detaching_until_their_handles_remove_them(way, registered):
    def body(rank, calls, remove):
        whole = [gradient_of(rank, alone=False)]
        rank.sync.detach()
        own = [gradient_of(rank, alone=True)]
        assert calls.seen == 4
        remove()
        own.append(gradient_of(rank, alone=True))
        assert calls.seen == 4
        return whole, own

    results = hooked(way, registered, body)
    assert_exact([whole for whole, _ in results], [true_gradient(slice(None), 4)])
    for number, (_, own) in enumerate(results):
        for got, factor in zip(own, (4, 1), strict=True):
            assert_same(got, true_gradient(SPLITS["two"][number], factor))


def one_for_each(model):
    return [torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()]


def step_inside(params, optimizers):
    """Each parameter's optimizer steps as soon as its gradient is there."""

    def hook(optimizer):
        def step(param):
            optimizer.step()
            optimizer.zero_grad()

        return step

    for param, optimizer in zip(params, optimizers, strict=True):
        param.register_post_accumulate_grad_hook(hook(optimizer))


@every_way
@pytest.mark.parametrize("cap_mb", [25, 1e-4])
def test_an_optimizer_that_steps_inside_a_hook(way, cap_mb):
    def body(rank):
        step_inside(rank.params, rank.optimizers)
        part, seen = SPLITS["two"][rank.number], []
        for _ in range(3):
            rank.sync.backward(mean_square(rank.model, part), weight=part.stop - part.start)
            seen.append(weights([rank.plain]))
            assert all(param.grad is None for param in rank.params)
        return seen

    true, seen = built(), []
    step_inside(true.parameters(), one_for_each(true))
    for _ in range(3):
        mean_square(true).backward()
        seen.append(weights([true]))
    assert_exact(on_ranks(way, body, make=one_for_each, bucket_cap_mb=cap_mb), seen)


@our_buckets
def test_a_hook_on_one_parameter_among_many(way):
    """A hook on one parameter alone, in the middle of several buckets."""

    def body(rank):
        replace_after(rank.plain[0].bias)
        return train(rank, "two")

    true, seen = built(mlp), []
    optimizer = momentum(true)
    replace_after(true[0].bias)
    for _ in range(3):
        optimizer.zero_grad()
        mean_square(true).backward()
        seen.append(gradients(true))
        optimizer.step()
    results = on_ranks(way, body, bucket_cap_mb=1e-4)
    assert_exact(results, [*seen, weights([true])])


def on_several(params, mode, seen):
    """Torch's own hook on several tensors: once a backward, with all of their gradients."""

    def all_came(found):
        seen.append({str(place): grad.clone() for place, grad in enumerate(found)})

    def one_came(found):
        seen.append({"first": torch.stack([found.norm()])})

    hook = all_came if mode == "all" else one_came
    return torch.autograd.graph.register_multi_grad_hook(params, hook, mode=mode)


@every_way
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("weighted", [True, False])
def test_torchs_hook_on_several_parameters(way, split, mode, weighted):
    def body(rank):
        seen, part = [], SPLITS[split][rank.number]
        handle = on_several(rank.params[1:3], mode, seen)
        for _ in range(2):
            rank.optimizer.zero_grad()
            size = part.stop - part.start
            if not size:
                rank.sync.reduce_pending()
            elif weighted:
                rank.sync.backward(mean_square(rank.model, part), weight=size)
            else:
                rank.sync.set_delivered_weight(size)
                mean_square(rank.model, part).backward()
        handle.remove()
        assert len(seen) == 2
        return seen

    true, seen = built(), []
    on_several(list(true.parameters())[1:3], mode, seen)
    mean_square(true, slice(0, SPLITS[split][-1].stop)).backward()
    results = on_ranks(way, body, size=len(SPLITS[split]))
    for results_of_rank in results:
        for got in results_of_rank:
            assert_same(got, seen[0])


@every_way
@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_hook_that_raises_leaves_an_open_window(way, kind, earlier):
    """An exception of the user's that is caught: no step with a half of the gradients."""

    def body(rank):
        if earlier:
            rank.sync.backward(mean_square(rank.model, SPLITS["two"][rank.number]), weight=1)

        def raises(_):
            raise KeyError("the user's")

        param = rank.params[1]
        handle = (
            param.register_hook(raises)
            if kind == "before"
            else param.register_post_accumulate_grad_hook(raises)
        )
        before = gradients(rank.plain) if earlier else {}
        with pytest.raises(KeyError, match="the user's"):
            rank.sync.backward(mean_square(rank.model, SPLITS["two"][rank.number]), weight=1)
        handle.remove()
        if earlier:
            assert_same(gradients(rank.plain), {name: grad * 2 for name, grad in before.items()})
        with pytest.raises(GradientNotReducedError):
            rank.optimizer.step()
        rank.optimizer.zero_grad()
        rank.sync.backward(mean_square(rank.model, SPLITS["two"][rank.number]), weight=1)
        rank.optimizer.step()

    on_ranks(way, body)


@our_buckets
def test_a_default_device_of_the_users(way):
    """Neither weights nor the hooks' backward live on whatever device is the default."""

    def body(rank):
        with torch.device("meta"):
            return train(rank, "two")

    results = on_ranks(way, body, before=on_all(clamp))
    assert_exact(results, one_process(clamp, "two"))
