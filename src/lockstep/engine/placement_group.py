# SPDX-License-Identifier: Apache-2.0
"""Reserves a placement group for the workers, or raises an error that says what is missing."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import TYPE_CHECKING

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

import ray
from lockstep.engine.keyboard_interrupt import reraise_keyboard_interrupt
from lockstep.engine.rank_assignment import group_by_node
from lockstep.errors import ConfigurationError, NotEnoughResourcesError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_log = logging.getLogger("lockstep")

# Ray frees the resources of a trainer some milliseconds after its shutdown.
_RELEASE_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.05

_inherited_groups: dict[str, int] = {}
"""Id of each inherited placement group (of a Tune trial) that our workers use -> index of the first
bundle that they may use."""

START_TIMEOUT_VARIABLE = "LOCKSTEP_START_TIMEOUT_S"
_LONGEST_START_TIMEOUT_S = 7 * 24 * 3600.0


def start_timeout_s() -> float:
    """Seconds to wait for resources (an autoscaler may have to start nodes), a week at most."""
    given = os.environ.get(START_TIMEOUT_VARIABLE, "60")
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ConfigurationError(
            f"{START_TIMEOUT_VARIABLE} is not a number of seconds", got=repr(given)
        )
    return min(seconds, _LONGEST_START_TIMEOUT_S)


def bundle_for(
    num_cpus: float, num_gpus: float, custom_resources: Mapping[str, float] | None
) -> dict[str, float]:
    """The resources of one worker, in Ray's names."""
    bundle: dict[str, float] = {"CPU": num_cpus, "GPU": num_gpus, **(custom_resources or {})}
    return {name: amount for name, amount in bundle.items() if amount}


@reraise_keyboard_interrupt()
def reserve(bundle: Mapping[str, float], count: int, own_cluster: bool) -> PlacementGroup:
    """Reserve `bundle` for each of `count` workers, spread over the nodes.

    A program that itself runs in a placement group, as a trial of Tune does, gives its bundles to
    the workers if the bundles are large enough and nothing else runs in them. It keeps the first
    bundle if it holds resources.

    Args:
        own_cluster: this process started the cluster for itself: no node can join it, and only
            this process can release resources in it.

    Raises:
        NotEnoughResourcesError: too few resources within the start timeout; none stay reserved.
    """
    inherited = _take_inherited_group(bundle, count)
    if inherited is not None:
        return inherited
    timeout_s = start_timeout_s()
    asked = {name: amount * count for name, amount in bundle.items()}
    if own_cluster:
        if _is_lacking(asked, ray.cluster_resources()):
            raise _not_enough_error(bundle, count, 0.0)
        timeout_s = min(timeout_s, _RELEASE_TIMEOUT_S)
    began = time.monotonic()
    group: PlacementGroup = placement_group([dict(bundle)] * count, strategy="SPREAD")
    try:
        if group.wait(timeout_seconds=max(1, round(timeout_s))):
            return group
        # Before the release: the message says what was free while this call waited.
        raise _not_enough_error(bundle, count, time.monotonic() - began)
    except BaseException:
        remove_placement_group(group)
        raise


def _take_inherited_group(bundle: Mapping[str, float], count: int) -> PlacementGroup | None:
    group: PlacementGroup | None = ray.util.get_current_placement_group()
    if group is None or group.id.hex() in _inherited_groups:
        return None
    # A trial that only drives its workers holds no resources: the workers get all bundles.
    first = int(bool(ray.get_runtime_context().get_assigned_resources()))
    offered = group.bundle_specs[first : first + count]
    if len(offered) < count or any(_is_lacking(bundle, each) for each in offered):
        return None
    if not _are_unused(group, range(first, first + count), bundle):
        return None
    _inherited_groups[group.id.hex()] = first
    return group


def _are_unused(group: PlacementGroup, places: range, bundle: Mapping[str, float]) -> bool:
    """Whether nothing else runs in these bundles of an inherited group.

    Ray puts tasks and actors of the program's own there as well, and workers would wait for their
    end without any limit. Those of an earlier trainer end within a moment.
    """
    wanted = {
        f"{name}_group_{place}_{group.id.hex()}": amount
        for place in places
        for name, amount in bundle.items()
    }
    deadline = time.monotonic() + _RELEASE_TIMEOUT_S
    while _is_lacking(wanted, ray.available_resources()):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def is_complete(group: PlacementGroup) -> bool:
    """Whether all bundles of `group` are reserved now: none has lost its node."""
    return bool(placement_group_table(group)["state"] == "CREATED")


def bundles_by_rank(group: PlacementGroup, count: int, num_spares: int) -> list[tuple[int, str]]:
    """A bundle and its node id for each of `count` workers, by rank; spares come last."""
    # In an inherited group the bundle of the program itself comes before.
    first = _inherited_groups.get(group.id.hex(), 0)
    nodes = placement_group_table(group)["bundles_to_node_id"]
    places = [(bundle, nodes[bundle]) for bundle in range(first, first + count)]
    workers, spares = places[: count - num_spares], places[count - num_spares :]
    return group_by_node(workers, lambda place: place[1]) + spares


def is_free(bundle: Mapping[str, float], count: int) -> bool:
    """Whether `bundle` for each of `count` workers is free, all nodes taken together."""
    asked = {name: amount * count for name, amount in bundle.items()}
    return not _is_lacking(asked, ray.available_resources())


def _is_lacking(asked: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return any(there.get(name, 0) < amount for name, amount in asked.items())


def warn_of_missing_resources(bundle: Mapping[str, float], count: int, what: str) -> None:
    """Warn that `what`, which waits for resources for ever, needs more than the cluster has.

    This is no error: an autoscaling cluster may have no node yet.
    """
    if not ray.is_initialized():
        return
    nodes = _nodes()
    places = _places_for(bundle, nodes)
    if places >= count:
        return
    asked = {name: amount * count for name, amount in bundle.items()}
    total = ray.cluster_resources()
    each = " + ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    there = ", ".join(f"{total.get(name, 0):g} {name}" for name in bundle)
    _log.warning(
        "%s can not start on this cluster, and will wait: it asks for %d x (%s), and there is room"
        " for %d of them on %d nodes with %s; %s; or let nodes join",
        what,
        count,
        each,
        places,
        len(nodes),
        there,
        _suggest_fix(asked, total),
    )


def _nodes() -> list[dict[str, float]]:
    """The resources of each node, whether they are free or not."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _places_for(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """For how many workers the nodes have room, each of them on one node."""
    return sum(
        int(min(node.get(name, 0) / amount for name, amount in bundle.items())) for node in nodes
    )


def _not_enough_error(
    bundle: Mapping[str, float], count: int, waited_s: float
) -> NotEnoughResourcesError:
    asked = {name: amount * count for name, amount in bundle.items()}
    total, free = ray.cluster_resources(), ray.available_resources()
    there = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in asked)
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in asked.items())
    each = " + ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    places = _places_for(bundle, _nodes())
    if _is_lacking(asked, total):
        cause, fix = "the cluster is too small", _suggest_fix(asked, total)
    elif places < count:
        cause = f"its nodes have room for {places}, as a worker needs all of its own on one node"
        fix = _suggest_fix(asked, total)
    else:
        cause = "other jobs, or another trainer that was not shut down, hold the rest"
        fix = "other_trainer.shutdown(), or fewer workers"
    workers = "a worker" if count == 1 else f"{count} workers"
    return NotEnoughResourcesError(
        f"the Ray cluster has no room for {workers}",
        where=f"after waiting {waited_s:.0f} s" if waited_s else None,
        expected=wanted if count == 1 else f"{wanted} ({each} each)",
        got=f"{there} free",
        cause=cause,
        fix=f"{fix}; {START_TIMEOUT_VARIABLE} sets how long to wait for a cluster that grows",
    )


def _suggest_fix(asked: Mapping[str, float], total: Mapping[str, float]) -> str:
    """What to do about a cluster that is too small, or whose nodes are."""
    lacking = [name for name in asked if asked[name] > total.get(name, 0)]
    if "GPU" in lacking:
        return "use_gpu=False, fewer workers, or a cluster with GPUs"
    if lacking and "CPU" not in lacking:
        given = ", ".join(f'"{name}": {asked[name]:g}' for name in lacking)
        return (
            "fewer workers, less in resources_per_worker, or, on one machine and before the"
            f" trainer, ray.init(resources={{{given}}})"
        )
    if not lacking:
        custom = ", or less in resources_per_worker" if asked.keys() - {"CPU", "GPU"} else ""
        return f"fewer workers, or a smaller num_cpus_per_worker{custom}"
    cpus = max(1, round(asked.get("CPU", 1)))
    return (
        "fewer workers, a smaller num_cpus_per_worker, or, on one machine and before the trainer,"
        f' ray.init(num_cpus={cpus}, logging_level="ERROR")'
    )


def release(group: PlacementGroup) -> None:
    """Release the resources of `group`; does nothing for an inherited group, or after Ray's end."""
    if _inherited_groups.pop(group.id.hex(), None) is not None:
        return
    if ray.is_initialized():
        remove_placement_group(group)
