# SPDX-License-Identifier: Apache-2.0
"""What a program draws is written down line by line, the numbers are those without an audit."""

import pickle

import pytest
import torch

from lockstep.audit.probe import draws
from lockstep.audit.probe.probe import Probe


@pytest.fixture
def probe():
    probe = Probe()
    probe.is_on, probe.steps_done = True, 1
    draws.install(probe)
    yield probe
    probe.stop()


def _drawn(seed):
    torch.manual_seed(seed)
    noise = [torch.randn(3, 2) for _ in range(2)]
    kept = torch.empty(4).uniform_()
    return [*noise, kept, torch.rand_like(kept), torch.randint(9, (5,))]


def test_each_line_has_its_shape_and_how_often_it_drew(probe):
    _drawn(0)
    found = [(d.shape, d.dtype, d.count) for d in probe.recent.draws.values()]
    assert found[:2] == [([3, 2], "torch.float32", 2), ([4], "torch.float32", 1)]
    assert {(tuple(s), t) for s, t, _ in found[2:]} == {((4,), "torch.float32")}
    assert all(d.where[0].file == __file__ for d in probe.recent.draws.values())


def _hashes(probe, seed):
    probe.recent.draws.clear()
    _drawn(seed)
    return [d.hash for d in probe.recent.draws.values()]


def test_equal_numbers_have_equal_hashes_and_others_others(probe):
    first, again, other = (_hashes(probe, seed) for seed in (0, 0, 1))
    assert first == again
    assert all(a != b for a, b in zip(first[:1], other[:1], strict=True))


def test_nothing_is_drawn_otherwise_and_nothing_is_left_in_torch():
    held = torch.randn, torch.Tensor.normal_
    alone = _drawn(5)
    probe = Probe()
    probe.is_on, probe.steps_done = True, 1
    draws.install(probe)
    watched = _drawn(5)
    assert torch.randn is not held[0]
    probe.stop()
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert (torch.randn, torch.Tensor.normal_) == held


def test_before_the_first_step_nothing_is_written_down(probe):
    probe.steps_done = 0
    _drawn(0)
    assert probe.recent.draws == {}


def test_after_enough_steps_torch_is_as_it_was(probe):
    watched = torch.randn
    for probe.steps_done in range(1, 16):
        draws.note_step(probe)
    assert torch.randn is watched
    probe.steps_done = 16
    draws.note_step(probe)
    assert torch.randn is not watched


def test_a_default_device_counts_also_for_what_is_watched():
    constructors = torch.utils._device._device_constructors
    constructors.cache_clear()
    probe = Probe()
    draws.install(probe)
    with torch.device("meta"):
        assert torch.randn(2).is_meta
    probe.stop()
    with torch.device("meta"):
        assert torch.randn(2).is_meta
        assert torch.empty(2).is_meta


def test_a_pickle_of_a_function_is_read_as_torchs(probe):
    data = pickle.dumps(torch.randn)
    probe.stop()
    assert pickle.loads(data) is torch.randn


def test_under_vmap_the_numbers_are_left_alone(probe):
    torch.vmap(lambda x: x + torch.rand_like(x), randomness="different")(torch.zeros(3, 2))
    assert probe.recent.draws == {}
    assert probe.ledger.facts.unseen == []


def _noisy(x):
    return x + torch.randn_like(x) + torch.rand(2) + torch.empty(2).normal_()


@pytest.mark.parametrize(
    "recorded",
    [
        lambda: torch.compile(_noisy, backend="eager", fullgraph=True),
        lambda: torch.jit.script(_noisy),
    ],
    ids=["compile", "script"],
)
@pytest.mark.filterwarnings("ignore")  # torch.jit is called outdated
def test_what_is_compiled_draws_the_same_numbers(probe, recorded):
    torch.manual_seed(3)
    given = torch.ones(2)
    watched = recorded()(given)
    probe.stop()
    torch.manual_seed(3)
    assert torch.equal(watched, _noisy(given))
