# SPDX-License-Identifier: Apache-2.0
"""Losses over all rows in lower precision, under autocast, and after a compiled encoder."""

import pytest
import torch
from torch import nn

import lockstep
from harness import assert_same, cut, gradients, reset, rows, run_ranks
from lockstep.group import Group
from lockstep.parity import TOLERANCES
from lockstep.sync import replicate
from ranks.contrastive import LEFT, RIGHT, TOTAL, clip, simclr, towers

SIZES = [16, 8]

LOSSES = {
    "gather": (
        lambda a, b, scale, group: clip(
            lockstep.gather(a, group=group), lockstep.gather(b, group=group), scale
        ),
        clip,
    ),
    "info_nce": (lambda a, b, scale, group: lockstep.info_nce(a, b, scale, group=group), clip),
    "nt_xent": (lambda a, b, scale, group: lockstep.nt_xent(a, b, scale, group=group), simclr),
}


def of_one_process(loss):
    model = towers()
    loss(*model(LEFT, RIGHT), model.scale).backward()
    return gradients(model)


def of_ranks(models, loss, *, dtype=torch.float64, autocast=None):
    def one_rank(group):
        model = models[group.rank]
        sync = replicate(model, group=group)
        mine = cut(TOTAL, SIZES)[group.rank]
        try:
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                a, b = model(LEFT[mine].to(dtype), RIGHT[mine].to(dtype))
                value = loss(a, b, model.scale, group)
            sync.backward(value, weight=SIZES[group.rank])
        finally:
            sync.detach()
        return {name: grad.double() for name, grad in gradients(model).items() if grad is not None}

    return run_ranks(2, one_rank)


def present(grads):
    return {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_models_of_lower_precision(loss, dtype):
    on_ranks, alone = loss
    true = present(of_one_process(alone))
    # A model in 16 bits rounds its own activations: the gather must not add to that.
    tolerance = TOLERANCES[dtype] * (1 if dtype is torch.float32 else 3)
    for found in of_ranks([towers().to(dtype) for _ in SIZES], on_ranks, dtype=dtype):
        assert_same(found, true, tolerance=tolerance)


APART = {
    "near": [1.0] * 12,
    "one row high above": [1.0] * 11 + [40.0],
    "one row far below": [1.0, -90.0] + [1.0] * 10,
    "all over": [float(10 * place) for place in range(12)],
    "some tiles only": [1.0] * 8 + [0.0, 30.0, 60.0, 200.0],
}
"""How much each pair is alike: exponents of one tile that no single exponential holds."""


@pytest.mark.parametrize("tile", [(4, 3), (512, 1024)])
@pytest.mark.parametrize("alike", APART.values(), ids=APART)
def test_similarities_that_lie_far_apart(alike, tile):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(12, 5, dtype=torch.float64, generator=generator)
    a *= torch.tensor(alike, dtype=a.dtype).unsqueeze(1)
    b = torch.randn(12, 5, dtype=torch.float64, generator=generator)

    def of(loss, dtype):
        given = [each.detach().clone().to(dtype) for each in (a, b, torch.tensor(2.0))]
        for each in given:
            each.requires_grad_()
        value = loss(*given)
        value.backward()
        assert all(each.grad.isfinite().all() for each in given)
        return [value.detach().double(), *(each.grad.double() for each in given)]

    true = of(clip, torch.float64)
    for dtype in (torch.float64, torch.float32):
        found = of(lambda *given: lockstep.info_nce(*given, tile=tile, group=Group(None)), dtype)
        for mine, whole in zip(found, true, strict=True):
            error = (mine - whole).norm() / whole.norm().clamp_min(1e-300)
            assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_under_autocast(loss):
    on_ranks, alone = loss
    true = present(of_one_process(alone))
    models = [towers().float() for _ in SIZES]
    for found in of_ranks(models, on_ranks, dtype=torch.float32, autocast=torch.bfloat16):
        assert_same(found, true, tolerance=3 * TOLERANCES[torch.bfloat16])


def test_a_gather_keeps_the_dtype_and_adds_in_float32():
    """512 + 1 is 512 in bfloat16: what ranks say about a row is added in float32."""

    def body(group):
        x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        everyone = lockstep.gather(x, group=group)
        (everyone * [512.0, 1.0, 1.0, 1.0][group.rank]).sum().backward()
        return everyone.dtype, x.grad

    for dtype, grad in run_ranks(4, body):
        assert dtype is torch.bfloat16
        assert torch.equal(grad, torch.full((2, 3), 515.0).bfloat16())


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_another_dimension(dim):
    parts = [rows(6, 2 + rank, seed=rank).reshape(2, 3, -1).movedim(-1, dim) for rank in range(2)]
    everything = torch.cat(parts, dim).requires_grad_()
    everything.exp().sum().backward()

    def body(group):
        x = parts[group.rank].clone().requires_grad_()
        everyone = lockstep.gather(x, dim=dim, group=group)
        assert torch.equal(everyone, everything)
        (everyone.exp().sum() / group.size).backward()
        place = lockstep.rank_slice(x, dim=dim, group=group)
        assert torch.allclose(x.grad, everything.grad.movedim(dim, 0)[place].movedim(0, dim))

    run_ranks(2, body)


def test_without_gradients_nothing_is_kept():
    def body(group):
        x = rows(4, 3, seed=group.rank).requires_grad_()
        with torch.no_grad():
            return (
                lockstep.gather(x, group=group).requires_grad,
                lockstep.info_nce(x, x, 1.0, group=group).requires_grad,
                lockstep.global_mean(x, group=group).item(),
            )

    everything = torch.cat([rows(4, 3, seed=rank) for rank in range(2)])
    for result in run_ranks(2, body):
        assert result == (False, False, pytest.approx(everything.mean().item(), rel=1e-12))


def test_a_tower_that_is_frozen():
    """Only one side has a gradient: the other's payload does not travel back."""

    def body(group):
        a = rows(4, 3, seed=group.rank).requires_grad_()
        b = rows(4, 3, seed=5 + group.rank)
        lockstep.info_nce(a, b, 2.0, group=group).backward()
        c = rows(4, 3, seed=5 + group.rank).requires_grad_()
        lockstep.info_nce(a.detach(), c, 2.0, group=group).backward()
        return a.grad, c.grad

    a = torch.cat([rows(4, 3, seed=rank) for rank in range(2)]).requires_grad_()
    b = torch.cat([rows(4, 3, seed=5 + rank) for rank in range(2)]).requires_grad_()
    clip(a, b, 2.0).backward()
    found = run_ranks(2, body)
    for position, true in enumerate((a.grad, b.grad)):
        got = torch.cat([result[position] for result in found]) / 2
        assert torch.allclose(got, true, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_after_a_compiled_encoder():
    """The encoder is compiled; the loss, which talks to other ranks, is not."""
    models = [towers() for _ in SIZES]
    for model in models:  # threads must not compile at the same time
        for side, tower in ((LEFT, "left"), (RIGHT, "right")):
            module = getattr(model, tower)
            module.compile(backend="aot_eager", dynamic=True)
            module(side[:16]).sum().backward()
            module(side[:8]).sum().backward()
        model.zero_grad()
    true = present(of_one_process(clip))
    for found in of_ranks(models, LOSSES["info_nce"][0]):
        assert_same(found, true)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_inside_a_compiled_function_the_graph_breaks():
    """The ranks' agreement is read by Python, so it is in no graph; what is around it can be."""
    model = reset(nn.Linear(3, 2), seed=1)
    alone = Group(None)

    def loss(x):
        a = lockstep.gather(model(x), group=alone)
        return lockstep.info_nce(a, a.tanh(), 2.0, group=alone)

    x = rows(4, 3, seed=1)
    torch.compile(loss, backend="aot_eager")(x).backward()
    found = gradients(model)
    model.zero_grad()
    loss(x).backward()
    assert_same(found, gradients(model))
