# SPDX-License-Identifier: Apache-2.0
"""Which rank gets which place: ranks of one host are neighbours, at the start and ever after.

And how long a trainer waits for room.
"""

from types import SimpleNamespace

import pytest

from lockstep.engine import placement_group, rank_assignment
from lockstep.engine.worker_handle import WorkerHandle
from lockstep.errors import ConfigurationError, WorkerDiedError
from lockstep.recovery.lost_worker import LostWorker
from lockstep.recovery.rank_table import RankTable


@pytest.fixture
def driver_on(monkeypatch):
    """The node that the driver is on."""

    def on(node):
        monkeypatch.setattr(rank_assignment, "this_node", lambda: node)

    return on


def group_on(*nodes, monkeypatch):
    """A placement group with a bundle on each of `nodes`."""
    table = {"bundles_to_node_id": dict(enumerate(nodes))}
    monkeypatch.setattr(placement_group, "placement_group_table", lambda group: table)
    return SimpleNamespace(id=SimpleNamespace(hex=lambda: "a group"))


def test_ranks_of_a_node_are_neighbours_and_the_drivers_come_first(driver_on, monkeypatch):
    driver_on("b")
    group = group_on("a", "b", "a", "b", "c", "a", monkeypatch=monkeypatch)
    places = placement_group.bundles_by_rank(group, 6, num_spares=0)
    assert places == [(1, "b"), (3, "b"), (0, "a"), (2, "a"), (5, "a"), (4, "c")]
    assert rank_assignment.local_ranks([node for _, node in places]) == [0, 1, 0, 1, 2, 0]


def test_a_driver_without_workers_on_its_node_changes_no_order(driver_on, monkeypatch):
    driver_on("elsewhere")
    group = group_on("a", "b", "a", monkeypatch=monkeypatch)
    assert placement_group.bundles_by_rank(group, 3, num_spares=0) == [(0, "a"), (2, "a"), (1, "b")]


def test_spares_come_last_whatever_their_node(driver_on, monkeypatch):
    driver_on("b")
    group = group_on("a", "b", "b", "a", monkeypatch=monkeypatch)
    places = placement_group.bundles_by_rank(group, 4, num_spares=2)
    assert places == [(1, "b"), (0, "a"), (2, "b"), (3, "a")]
    # Their local ranks go on counting: two processes of a node never share one.
    assert rank_assignment.local_ranks([node for _, node in places]) == [0, 0, 1, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_in_a_lent_group_the_programs_own_bundle_is_left_out(driver_on, monkeypatch, first):
    driver_on("a")
    group = group_on("a", "b", "a", monkeypatch=monkeypatch)
    monkeypatch.setitem(placement_group._inherited_groups, "a group", first)
    seats = [seat for seat, _ in placement_group.bundles_by_rank(group, 2, num_spares=0)]
    assert seats == ([0, 1] if first == 0 else [2, 1])


def test_local_ranks_of_nobody():
    assert rank_assignment.local_ranks([]) == []


def members(*nodes, first=0):
    return [WorkerHandle(first + n, node, 0) for n, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("lost", "spare", "expected"),
    [
        (1, "far", [0, 10, 2, 3]),
        (1, "near", [0, 10, 2, 3]),
        (2, "near", [0, 1, 10, 3]),
        (3, "near", [0, 1, 10, 2]),  # and not behind the far one
        (0, "far", [1, 10, 2, 3]),  # and not before the near one
        (1, None, [0, 2, 3]),
    ],
)
def test_a_spare_takes_a_place_among_the_ranks_of_its_host(driver_on, lost, spare, expected):
    driver_on("near")
    everyone = members("near", "near", "far", "far")
    table = RankTable(everyone)
    table.mark_lost(LostWorker(everyone[lost], lost, range(0), WorkerDiedError("it died")))
    ready = [] if spare is None else members(spare, first=10)
    roster = table.assign_ranks(ready, num_workers=4)
    assert [member.number for member in roster] == expected


@pytest.mark.parametrize(("given", "seconds"), [("2.5", 2.5), ("0", 0), ("inf", 7 * 24 * 3600)])
def test_the_time_that_the_cluster_gets_to_find_room_ends(monkeypatch, given, seconds):
    monkeypatch.setenv(placement_group.START_TIMEOUT_VARIABLE, given)
    assert placement_group.start_timeout_s() == seconds


@pytest.mark.parametrize("given", ["nan", "-inf", "-1", "a minute"])
def test_a_time_that_is_none_is_refused(monkeypatch, given):
    monkeypatch.setenv(placement_group.START_TIMEOUT_VARIABLE, given)
    with pytest.raises(ConfigurationError, match=f"not a number of seconds\n.*'{given}'"):
        placement_group.start_timeout_s()


@pytest.mark.parametrize(
    ("nodes", "bundle", "count", "cause", "fix"),
    [
        ([{"CPU": 2}], {"CPU": 1}, 4, "the cluster is too small", "ray.init(num_cpus=4"),
        ([{"CPU": 8}], {"CPU": 1, "GPU": 1}, 2, "the cluster is too small", "use_gpu=False"),
        ([{"CPU": 8}], {"CPU": 1, "tpu": 2}, 2, "the cluster is too small", '{"tpu": 4})'),
        (2 * [{"CPU": 3}], {"CPU": 2}, 3, "its nodes have room for 2, as", "smaller num_cpus"),
        (2 * [{"CPU": 2}], {"CPU": 3}, 1, "its nodes have room for 0, as", "smaller num_cpus"),
        ([{"CPU": 4}], {"CPU": 2}, 2, "other jobs, or", "other_trainer.shutdown()"),
    ],
)
def test_why_there_is_no_room(monkeypatch, nodes, bundle, count, cause, fix):
    names = {name for node in nodes for name in node}
    total = {name: sum(node.get(name, 0) for node in nodes) for name in names}
    told = [{"Resources": node, "Alive": True} for node in nodes]
    monkeypatch.setattr(placement_group.ray, "nodes", lambda: [*told, {**told[0], "Alive": False}])
    monkeypatch.setattr(placement_group.ray, "cluster_resources", lambda: total)
    monkeypatch.setattr(placement_group.ray, "available_resources", dict)
    said = str(placement_group._not_enough_error(bundle, count, 1.0))
    assert cause in said
    assert fix in said
