# SPDX-License-Identifier: Apache-2.0
"""What a program draws is written down line by line, the numbers are those without an audit."""

import pickle

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lockstep.audit.probe import backwards, draws, wrappers
from lockstep.audit.probe.probe import Probe


def begin(probe):
    """As it is when an optimizer has stepped once."""
    probe.is_on, probe.steps_done = True, 1
    draws.note_step(probe)


@pytest.fixture
def probe():
    probe = Probe()
    begin(probe)
    yield probe
    probe.stop()


def _drawn(seed):
    torch.manual_seed(seed)
    noise = [torch.randn(3, 2) for _ in range(2)]
    kept = torch.rand(4)
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
    held = torch.randn
    alone = _drawn(5)
    probe = Probe()
    begin(probe)
    watched = _drawn(5)
    assert torch.randn is not held
    probe.stop()
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert torch.randn is held


@pytest.mark.parametrize("compiles", [False, True])
def test_torch_is_as_it_was_but_for_the_steps_that_are_needed(compiles):
    own = torch.randn
    probe = Probe()
    probe.is_on, probe.compiles = True, compiles
    assert torch.randn is own
    replaced = []
    for probe.steps_done in range(1, 6):
        draws.note_step(probe)
        replaced.append(torch.randn is not own)
    assert replaced == ([False] * 5 if compiles else [True, True, True, False, False])
    assert torch.randn is own


def test_a_function_that_was_held_on_to_says_nothing_any_more(probe):
    held = torch.randn
    probe.drawing.undo()
    held(3)
    assert probe.recent.draws == {}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_not_for_training_is_left_out(probe, mode):
    with mode():
        _drawn(0)
    assert probe.recent.draws == {}


def test_a_simulator_is_not_looked_at_for_long(probe):
    for _ in range(300):
        torch.rand(1)
    assert [d.count for d in probe.recent.draws.values()] == [256]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(resolve_name(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, Asked])
def test_a_mode_sees_what_it_sees_without_us(probe, mode):
    with mode() as watched:
        torch.randn(8, 4)
        torch.rand_like(torch.ones(5))
    assert len(probe.recent.draws) == 2
    probe.stop()
    with mode() as alone:
        torch.randn(8, 4)
        torch.rand_like(torch.ones(5))
    assert watched.names == alone.names


class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x) + torch.randn(2, 3)


class Projected(torch.nn.Module):
    """A term of a loss, with directions of its own and nothing to train."""

    def forward(self, x):
        return x @ torch.randn(3, 4)


def test_when_it_is_drawn(probe):
    wrappers.install(probe)
    backwards.install(probe)
    torch.rand(7)
    out = checkpoint(
        lambda x: x * torch.rand(10, 1), torch.ones(3, requires_grad=True), use_reentrant=False
    )
    out = Projected()(Noisy()(out[:2]))
    torch.rand(8)
    out.sum().backward()
    torch.rand(9)
    found = {tuple(d.shape): d.when for d in probe.recent.draws.values()}
    assert {d.count for d in probe.recent.draws.values()} == {1}
    after = {(3, 4): "after", (8,): "after"}
    assert found == {(7,): "before", (10, 1): "before", (2, 3): "within", **after, (9,): "before"}


def test_a_default_device_counts_also_for_what_is_watched():
    constructors = torch.utils._device._device_constructors
    constructors.cache_clear()
    probe = Probe()
    begin(probe)
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
