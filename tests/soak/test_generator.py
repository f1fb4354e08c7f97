# SPDX-License-Identifier: Apache-2.0
"""The generator itself: what is wrong is found, made small and written down."""

import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

from lockstep.errors import LockstepError, PeerLostError
from soak import refusals
from soak.drawing import is_fair, named
from soak.judging import NUDGE, Outcome, Trace, judged, spread_of
from soak.refusals import REFUSALS, is_explained
from soak.running import Runner, one_process, source_of
from soak.sample import every_piece
from soak.scripts import write
from soak.shrinking import candidates, shrunk
from soak.spec import Spec, Step
from soak.worlds import RankWorld

ROOT = Path(__file__).resolve().parents[2]
PLAIN = Step({"kind": "plain"})


def drawn(count, **fixed):
    return [named(f"drawn:{number}", **fixed) for number in range(count)]


def test_a_name_gives_the_same_program():
    assert drawn(300) == drawn(300)
    assert [source_of(spec) for spec in drawn(50)] == [source_of(spec) for spec in drawn(50)]
    assert len({spec.to_json() for spec in drawn(300)}) == 300


def test_specs_survive_being_written_down():
    for spec in drawn(300):
        assert Spec.from_json(spec.to_json()) == spec


def test_what_is_drawn_and_what_it_shrinks_to_is_fair():
    for spec in drawn(300):
        assert is_fair(spec), spec
    assert all(named(f"fixed:{number}", sync="ddp", workers=3).workers == 3 for number in range(20))


def pieces_of(model):
    """What 600 programs of a model are made of."""
    specs = drawn(600, model=model, sync="replicate", trainer=0.0)
    return set().union(*(spec.pieces() for spec in specs))


@pytest.mark.parametrize("model", ["compiled", "branches"])
def test_no_layer_fails_in_a_model_whose_ranks_do_not_all_reach_it(model):
    """A rank without its rows, or that has compiled before the failure was there."""
    assert "before:caught_midway" in pieces_of("mlp")
    assert "before:caught_midway" not in pieces_of(model)


def test_shrinking_ends():
    """Each candidate is simpler: whatever all of them show, none comes back."""
    for spec in drawn(40):
        small = shrunk(spec, Outcome("wrong", "all"), lambda _: Outcome("wrong", "all"))
        assert not [one for one in candidates(small) if is_fair(one) and one == small]
        assert len(small.steps) == 1
        assert small.model == "linear" or "loop" in small.options


class DividesByOneMore(RankWorld):
    """The gradients of N ranks, divided by N + 1."""

    def attach(self, modules, optimizers):
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self.spoil)
        return super().attach(modules, optimizers)

    def spoil(self, optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(self.group.size / (self.group.size + 1))


def run_with(world, spec, patience_s=8.0):
    runner = Runner(patience_s, world)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return runner.run(spec)
    finally:
        runner.close()


@pytest.mark.timeout(240)
def test_a_wrong_synchroniser_is_found_and_made_small():
    fixed = {"sync": "replicate", "trainer": 0.0}
    found = next(
        (spec, outcome)
        for spec in drawn(20, **fixed)
        if (outcome := run_with(DividesByOneMore, spec)).what == "gradient"
    )
    small = shrunk(*found, lambda spec: run_with(DividesByOneMore, spec))
    assert run_with(DividesByOneMore, small).kind == "wrong"
    assert run_with(RankWorld, small).kind == "exact"
    assert (small.model, len(small.steps), small.workers) == ("linear", 1, 1)
    assert len(source_of(small).splitlines()) < 25


def test_a_rank_that_alone_goes_wrong_is_found():
    class OnRankOne(DividesByOneMore):
        def spoil(self, *arguments):
            if self.rank == 1:
                super().spoil(*arguments)

    outcome = run_with(OnRankOne, Spec(steps=(PLAIN,)))
    assert (outcome.kind, outcome.what) == ("wrong", "gradient")
    assert "rank 1" in outcome.text


def test_a_zero_in_the_place_of_none_is_found():
    class Zeros(RankWorld):
        def attach(self, modules, optimizers):
            optimizers[0].register_step_pre_hook(self.fill)
            return super().attach(modules, optimizers)

        def fill(self, optimizer, args, kwargs):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad

    assert run_with(Zeros, Spec(model="branches")).what == "none"


def test_a_rank_that_hangs_ends_as_such():
    ends = threading.Event()

    class Waits(RankWorld):
        def attach(self, modules, optimizers):
            if self.rank == 1:
                ends.wait()
            return super().attach(modules, optimizers)

    try:
        assert run_with(Waits, Spec(), patience_s=1.0).kind == "hang"
    finally:
        ends.set()


def test_a_refusal_on_one_rank_alone_is_none():
    class Alone(RankWorld):
        def end(self):
            super().end()
            if self.rank == 1:
                raise LockstepError("refused here")

    outcome = run_with(Alone, Spec())
    assert (outcome.kind, outcome.what) == ("wrong", "refused on some ranks only")


def test_a_refusal_that_nobody_explained_fails():
    class Everywhere(RankWorld):
        def attach(self, modules, optimizers):
            raise LockstepError("refused")

    outcome = run_with(Everywhere, Spec())
    assert (outcome.kind, outcome.what, outcome.fails) == ("unexplained", "LS000", True)


def test_a_program_that_fails_in_one_process_says_nothing():
    spec = Spec(steps=(Step({"kind": "plain"}, after=({"kind": "flat_read"},)),))
    assert run_with(RankWorld, spec).kind == "discarded"


def test_refusals_are_of_pieces_that_exist():
    others = {"update:twice", "update:one_rank_leaves_out", "optimizer:lbfgs", "absent:pending"}
    assert {refusal.piece for refusal in REFUSALS} <= every_piece() | others
    assert is_explained(Spec(model="embedding_sparse"), "LS103")
    assert not is_explained(Spec(model="embedding_sparse"), "LS101")
    assert not is_explained(Spec(), "LS103")


def test_the_page_of_refusals_is_this_table():
    page = (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8")
    assert refusals.page() in page, "run `python -m soak --page` and put its output into the page"


@pytest.mark.slow
def test_a_script_shows_the_failure_by_itself(tmp_path):
    spec = Spec(steps=(Step({"kind": "by_hand"}),), way="equal", splits=((2, 2),))
    path = write(tmp_path, "refused", spec, Outcome("refused", "LS101"))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "one process: optimizer 0, step 0" in done.stdout
    assert "rank 1: GradientNotReducedError: [LS101]" in done.stdout


def step_with(value):
    return [[[torch.as_tensor(value)]], [torch.as_tensor(value)]]


@pytest.mark.parametrize("allowed", [1, 2])
@pytest.mark.parametrize(("more", "kind"), [(0, "refused"), (1, "wrong")])
def test_a_peer_may_be_ahead_of_a_refusal_until_its_next_round(allowed, more, kind):
    true = Trace([[step_with(float(n)) for n in range(3)]], [], [torch.zeros(())])
    refused = Trace([[]], [], [torch.zeros(())], error=PeerLostError("gone"))
    wrong = Trace([[step_with(9.0)] * (allowed + more)], [], [torch.ones(())])
    known = {"is_late": False, "by_hand": False}
    assert judged(true, [refused, wrong], steps_ahead=allowed, **known).kind == kind
    assert judged(true, [refused, wrong], **known).kind == "wrong"


def test_what_a_program_makes_of_a_rounding_error_is_allowed_and_no_more():
    def ends_at(value):
        return Trace([[step_with(torch.tensor(value, dtype=torch.float64))]], [], [])

    known = {"is_late": False, "by_hand": False}
    true = ends_at(1.0)
    makes = spread_of(true, ends_at(1.0 + 1e-10))
    assert judged(true, [ends_at(1.0 + 1e-9)], **known).kind == "wrong"
    assert judged(true, [ends_at(1.0 + 1e-9)], **known, spread=makes).kind == "exact"
    assert judged(true, [ends_at(1.001)], **known, spread=makes).kind == "wrong"


def test_one_process_that_begins_a_few_last_places_away_is_another():
    true = one_process(Spec(), source_of(Spec()))
    for apart in spread_of(true, one_process(Spec(), source_of(Spec()), NUDGE)).values():
        assert 0 < apart < 1e-12
