# SPDX-License-Identifier: Apache-2.0
"""Rules that fail, and ranks whose records cannot be laid side by side."""

from types import SimpleNamespace

import numpy as np

from audit.ledgers import of_one_step
from lockstep.audit.facts import Collective, Step
from lockstep.audit.finding import Place
from lockstep.audit.judgement import judge
from lockstep.audit.rules import RULES
from lockstep.audit.rules.base import Rule
from lockstep.audit.rules.gradients import BYPASSED, _reduced_together
from lockstep.audit.rules.not_finite import _has_gone_wrong
from lockstep.audit.world import World


def test_ranks_that_kept_other_elements_are_compared_by_their_norms():
    world = World([of_one_step(0, kept=3, norm=1.0), of_one_step(1, kept=2, norm=2.0)])
    (track,) = world.tracks
    (difference,) = track.differences("exit", 0)
    assert list(difference.norms.values()) == [1.0, 2.0]
    assert np.isnan(difference.largest)
    assert track.drift() == []
    near = World([of_one_step(0, kept=3, norm=1.0), of_one_step(1, kept=2, norm=1.0)])
    assert near.tracks[0].differences("exit", 0) == []


def test_reductions_meet_within_their_group():
    def step(*calls):
        return Step(0, [], collectives=[Collective("all_reduce", [], group) for group in calls])

    everyone, pair, other = [0, 1, 2, 3], [0, 1], [2, 3]
    steps = {0: step(pair, everyone), 1: step(everyone, pair, pair), 2: step(other, everyone)}
    met = [{rank: call.group for rank, call in each.items()} for each in _reduced_together(steps)]
    assert sorted(sorted(each) for each in met) == [[0, 1], [0, 1, 2], [2]]
    assert all(len(set(map(str, each.values()))) == 1 for each in met)


def test_a_rule_that_fails_costs_no_other_finding_and_the_report_says_so(monkeypatch):
    ledgers = [of_one_step(0, kept=2, norm=1.0), of_one_step(1, kept=2, norm=2.0)]
    expected = [f.code for f in judge(ledgers)]
    assert expected

    def look(world):
        yield from ()
        raise ZeroDivisionError("nobody saw it coming")

    broken = Rule((BYPASSED,), look)
    monkeypatch.setattr("lockstep.audit.judgement.RULES", (broken, *RULES))
    assert [f.code for f in judge(ledgers)] == expected
    assert all("the rule of LS101: ZeroDivisionError" in led.facts.unseen[0] for led in ledgers)
    assert all(led.facts.failed_rules == ["LS101"] for led in ledgers)


def test_what_is_found_for_many_optimizers_at_one_line_is_told_once(monkeypatch):
    here, there = (Place("train.py", line, "main", "optimizer.step()") for line in (7, 9))

    def look(world):
        for number in range(3):
            yield BYPASSED.finding(f"{number}", "", optimizer=f"SGD#{number}", where=[here])
        yield BYPASSED.finding("elsewhere", "", optimizer="SGD#4", where=[there])
        yield BYPASSED.finding("of none", "", where=[there])

    monkeypatch.setattr("lockstep.audit.judgement.RULES", (Rule((BYPASSED,), look),))
    found = judge([of_one_step(0, kept=2, norm=1.0), of_one_step(1, kept=2, norm=2.0)])
    told = "0 (and so for 2 more optimizers)"
    assert sorted(f.message for f in found) == [told, "elsewhere", "of none"]
    assert [f.evidence for f in found if f.message == told] == [{"also": ["SGD#1", "SGD#2"]}]


def test_a_rule_is_not_asked_where_something_excludes_it():
    def look(world):
        return [BYPASSED.finding("seen", "fix it")]

    world = World([of_one_step(0, kept=2, norm=1.0), of_one_step(1, kept=2, norm=2.0)])
    assert [f.code for f in Rule((BYPASSED,), look, (World.has_failed,)).judge(world)] == ["LS101"]
    world.ledgers[0].exit_code = 1
    assert list(Rule((BYPASSED,), look, (World.has_failed,)).judge(world)) == []


def test_a_sharded_parameter_without_samples_is_not_spoiled_by_a_step_that_was_left_out():
    """Of a large model the probe takes 256 samples in all."""
    entry = SimpleNamespace(hashes=[1, 2], samples=np.ones(1))
    step = SimpleNamespace(entry=entry, exit=entry, not_finite=["bias", "weight"])
    parameters = [
        SimpleNamespace(name="bias", samples=0, sharded=True),
        SimpleNamespace(name="weight", samples=1, sharded=False),
    ]
    assert not _has_gone_wrong(SimpleNamespace(parameters=parameters), step)
    step.exit = SimpleNamespace(hashes=[1, 2], samples=np.full(1, np.nan))
    assert _has_gone_wrong(SimpleNamespace(parameters=parameters), step)
