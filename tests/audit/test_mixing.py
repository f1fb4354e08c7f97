# SPDX-License-Identifier: Apache-2.0
"""The solve on equations whose coefficients are known."""

import numpy as np
import pytest

from lockstep.audit.equations import Column, Equations, tolerance
from lockstep.audit.mixing import limit_of, solve

SAMPLES = 40


def equations(coefficients, local, parameters=1, dtype="float32"):
    """What R ranks used of K columns, rounded as `dtype` is."""
    single = np.float64 if dtype == "float64" else np.float32
    used = (local.astype(single) @ coefficients.T.astype(single)).T.astype(float)
    ranks = list(range(len(coefficients)))
    backwards = local.shape[1] // len(ranks)
    columns = [Column(rank, place) for rank in ranks for place in range(backwards)]
    size = len(local)
    return Equations(
        ranks,
        columns,
        local.astype(single).astype(float),
        used,
        np.arange(size) * parameters // size,
        np.zeros(size, dtype=int),
        np.full(size, tolerance(dtype)),
    )


def random(columns, seed=0):
    return np.random.default_rng(seed).normal(size=(SAMPLES, columns))


WAYS = {
    "mean": np.full((4, 8), 0.25),
    "sum": np.full((4, 8), 1.0),
    "own": np.kron(np.eye(4), np.ones((1, 2))),
    "of rank 2": np.tile([0, 0, 0, 0, 1.0, 1.0, 0, 0], (4, 1)),
    "clipped": np.tile([0.25, 0.25, 0.2, 0.2, 0.25, 0.25, 0.11, 0.11], (4, 1)),
    "of scales": np.outer([1.0, 0.5, 0.25, 0.125], np.full(8, 0.25)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_coefficients_are_those_that_were_used(way, dtype):
    (mixing,) = solve(equations(WAYS[way], random(8), dtype=dtype))
    assert np.abs(mixing.coefficients - WAYS[way]).max() < 1e-5
    assert mixing.errors.max() < 1e-4


def test_uses_of_columns():
    uses = {}
    for way, coefficients in WAYS.items():
        (mixing,) = solve(equations(coefficients, random(8)))
        uses[way] = {mixing.use_of(column) for column in range(8)}
    assert uses["mean"] == uses["sum"] == uses["clipped"] == uses["of scales"] == {"shared"}
    assert uses["own"] == {"kept"}
    assert uses["of rank 2"] == {"shared", "lost"}


def test_columns_that_are_equal_are_not_told_apart():
    """All ranks had the same data: whether one rank's gradients were used nobody can say."""
    local = np.tile(random(1), (1, 4))
    for coefficients in (np.full((4, 4), 0.25), np.eye(4), np.tile([1.0, 0, 0, 0], (4, 1))):
        (mixing,) = solve(equations(coefficients, local))
        assert {mixing.use_of(column) for column in range(4)} <= {"unknown", "shared"}
        assert mixing.errors.min() > 1.0
        assert mixing.total(0) == pytest.approx(1.0, rel=1e-4)


def test_too_few_elements_say_nothing():
    some = equations(WAYS["mean"], random(8)[:9])
    assert solve(some) == []


def test_each_set_of_parameters_has_its_own():
    half = equations(np.full((2, 2), 0.5), random(2), parameters=4)
    own = equations(np.eye(2), random(2), parameters=4)
    first = half.parameter < 2
    used = np.where(first, half.used, own.used)
    mixed = Equations(
        half.ranks, half.columns, half.local, used, half.parameter, half.unit, half.close
    )
    found = {tuple(m.parameters): m.coefficients.round(4).tolist() for m in solve(mixed)}
    assert found == {(0, 1): [[0.5, 0.5], [0.5, 0.5]], (2, 3): [[1.0, 0.0], [0.0, 1.0]]}


@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_the_limit_at_which_each_rank_cut_off_its_own(divisor):
    whole = equations(np.full((3, 3), 1.0), random(3))
    used = np.clip(whole.local, -0.7, 0.7).sum(axis=1) / divisor
    cut = Equations(
        whole.ranks,
        whole.columns,
        whole.local,
        np.tile(used, (3, 1)),
        whole.parameter,
        whole.unit,
        whole.close,
    )
    assert solve(cut) == []
    assert limit_of(cut) == pytest.approx(0.7)


def test_noise_is_explained_by_no_mixing_and_no_limit():
    whole = equations(np.full((2, 2), 0.5), random(2))
    noisy = Equations(
        whole.ranks,
        whole.columns,
        whole.local,
        whole.used + random(1, seed=1)[:, 0],
        whole.parameter,
        whole.unit,
        whole.close,
    )
    assert solve(noisy) == []
    assert limit_of(noisy) is None
