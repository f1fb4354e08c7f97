# SPDX-License-Identifier: Apache-2.0
"""Rules that fail, and ranks whose records cannot be laid side by side."""

import numpy as np

from lockstep.audit.judgement import judge
from lockstep.audit.ledger import Collective, Ledger, Parameter, Step, Track
from lockstep.audit.prints import Fingerprint
from lockstep.audit.rules import RULES
from lockstep.audit.rules.gradients import _reduced_together
from lockstep.audit.world import World


def _ledger(rank, kept, norm):
    """Of a rank that kept so many elements of one parameter, whose gradient had that norm."""
    held = Fingerprint(np.array([rank]), np.array([norm]), np.arange(float(kept)))
    track = Track("SGD#0", "SGD", [], [Parameter("weight", [99], "float32", samples=kept)])
    track.steps = [Step(0, [], entry=held, gradients=held, exit=held)]
    track.count = 1
    return Ledger(rank=rank, world_size=2, tracks=[track], started_group=True)


def test_ranks_that_kept_other_elements_are_compared_by_their_norms():
    world = World([_ledger(0, kept=3, norm=1.0), _ledger(1, kept=2, norm=2.0)])
    (track,) = world.tracks
    (difference,) = track.differences("exit", 0)
    assert list(difference.norms.values()) == [1.0, 2.0]
    assert np.isnan(difference.largest)
    assert track.drift() == []
    near = World([_ledger(0, kept=3, norm=1.0), _ledger(1, kept=2, norm=1.0)])
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
    ledgers = [_ledger(0, kept=2, norm=1.0), _ledger(1, kept=2, norm=2.0)]
    expected = [f.code for f in judge(ledgers)]
    assert expected

    class Broken:
        codes = ()

        def judge(self, world, explained):
            yield from ()
            raise ZeroDivisionError("nobody saw it coming")

    monkeypatch.setattr("lockstep.audit.judgement.RULES", (Broken(), *RULES))
    assert [f.code for f in judge(ledgers)] == expected
    assert all("Broken: ZeroDivisionError" in led.facts["unseen"][0] for led in ledgers)
