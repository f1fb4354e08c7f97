# SPDX-License-Identifier: Apache-2.0
"""A host falls silent, as by a power failure: no packet and no reset comes from it any more."""

import json
from pathlib import Path

import pytest
from benchmarks.network_namespaces import are_possible

from two_hosts import TwoHosts

PROGRAM = Path(__file__).parents[1] / "programs" / "silent_host.py"
PLACES = ("forward", "backward", "all-reduce", "step", "validation", "checkpoint")
HANG_S = 3.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not are_possible(), reason="no network namespaces of one's own here"),
]


def runs_on_two_hosts(sync, spares, places, *, patient=True, hang_s=HANG_S):
    with TwoHosts((2 + spares, 2), patient=patient) as hosts:
        told = hosts.told_by(
            str(PROGRAM), sync, str(spares), str(hang_s), *places, timeout_s=500
        )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    lines = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    undisturbed, *found = lines
    assert [one["place"] for one in found] == list(places)
    # Ranks of one host are neighbours, and those of the driver's host come first.
    assert undisturbed["neighbours"]
    assert undisturbed["first is here"]
    assert undisturbed["recoveries"] == []
    for one in found:
        # A second to notice and one to form a group: on two processors five of these workers take
        # more than half of it. On a busy machine steps are late without any fault as well.
        one["limit_s"] = hang_s + 2 + undisturbed["gap_s"]
    return found


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("sync", ["replicate", "ddp", "parameter_server"])
def test_the_near_workers_go_on_and_the_far_side_does_not(sync, spares):
    for one in runs_on_two_hosts(sync, spares, PLACES):
        (recovery,) = one["recoveries"]
        assert one["workers"] == recovery["workers"] == 2 + spares, one
        assert one["gap_s"] < one["limit_s"], one
        assert one["off"] <= 1e-12, one
        assert one["bits"] or sync != "replicate", one
        # The link is up again: the far processes end, and nothing of theirs is taken.
        assert one["stamped later"] == [], one
        assert one["same after"], one
        assert one["saved after"], one


@pytest.mark.parametrize("place", ["backward", "step"])  # Ray takes no host back that it gave up
@pytest.mark.parametrize("sync", ["replicate", "ddp", "parameter_server"])
def test_a_host_that_ray_has_given_up_is_not_waited_for(sync, place):
    (one,) = runs_on_two_hosts(sync, 0, [place], patient=False, hang_s=600)
    assert one["workers"] == 2, one
    assert one["off"] <= 1e-12, one
    assert one["bits"] or sync != "replicate", one
    assert one["after ray_s"] < 2, one
