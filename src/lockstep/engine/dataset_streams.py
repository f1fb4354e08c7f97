# SPDX-License-Identifier: Apache-2.0
"""A Ray dataset, split into one stream for each worker."""

from __future__ import annotations

from typing import Any, Final

from lockstep.errors import NotEnoughResourcesError

_NEEDED_CPUS: Final = 1


def split_dataset(dataset: Any, num_workers: int, held_cpus: float) -> list[Any]:
    """Split `dataset` into one ``ray.data.DataIterator`` for each worker, by rank.

    Args:
        dataset: a ``ray.data.Dataset``.
        num_workers: the number of streams.
        held_cpus: CPUs of the cluster that the workers hold.

    Raises:
        NotEnoughResourcesError: the workers hold every CPU of the cluster, and Ray's tasks that
            read the dataset would wait for a CPU for ever.
    """
    import ray

    total = ray.cluster_resources().get("CPU", 0)
    if total - held_cpus < _NEEDED_CPUS:
        raise NotEnoughResourcesError(
            "no CPU is left for reading the dataset",
            expected=f"at least {_NEEDED_CPUS} CPU beside those of the workers",
            got=f"{total:g} CPUs in the cluster, {held_cpus:g} held by the workers",
            cause="Ray Data reads blocks in tasks of its own, each of which needs a CPU",
            fix="fewer workers, a larger cluster, or num_cpus_per_worker=1",
        )
    return list(dataset.streaming_split(num_workers, equal=False))
