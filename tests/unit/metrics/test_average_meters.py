# SPDX-License-Identifier: Apache-2.0
"""Weighted means over uneven shards equal the means that one process computes."""

from __future__ import annotations

import copy
import math
import pickle
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.errors import ConfigurationError, WeightError
from lockstep.keys import WEIGHT
from lockstep.metrics import AverageMeter, AverageMeterCollection, merge, merge_user_results


def collect(*updates: tuple[dict[str, Any], float]) -> AverageMeterCollection:
    meters = AverageMeterCollection()
    for metrics, n in updates:
        meters.update(metrics, n=n)
    return meters


def test_one_worker_reports_what_raysgd_did() -> None:
    meters = collect(({"loss": 2.0}, 1), ({"loss": 0.1}, 3))
    assert meters.summary() == {
        "batch_count": 2,
        "num_samples": 4,
        "loss": pytest.approx(2.3 / 4, rel=1e-15),
        "last_loss": 0.1,
    }
    assert meters.n == 4


def test_average_meter() -> None:
    meter = AverageMeter()
    assert (meter.val, meter.avg, meter.sum, meter.count) == (0, 0, 0, 0)
    meter.update(3.0, n=0)
    assert meter.count == 0
    meter.update(2.0)
    meter.update(5.0, n=2)
    assert (meter.val, meter.avg, meter.sum, meter.count) == (5.0, 4.0, 12.0, 3)
    meter.reset()
    assert (meter.val, meter.avg, meter.sum, meter.count) == (0, 0, 0, 0)


def test_average_meter_leaves_the_callers_tensor_alone() -> None:
    meter, loss = AverageMeter(), torch.tensor(2.0)
    meter.update(loss)
    meter.update(loss)
    assert loss.item() == 2.0
    assert meter.avg == 2.0


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(60000.0, dtype=torch.float16),
        torch.tensor(60000.0, dtype=torch.float16, requires_grad=True),
        torch.tensor([60000.0, 1.0], dtype=torch.float16),
        np.float16(60000.0),
    ],
    ids=["scalar", "graph", "vector", "numpy"],
)
def test_average_meter_adds_up_in_more_than_16_bits(value: Any) -> None:
    meter = AverageMeter()
    for _ in range(1000):
        meter.update(value * 1)
    first = meter.avg[0] if value.shape else meter.avg
    assert (first, meter.count) == (60000.0, 1000)
    kept = [each for each in (meter.val, meter.avg, meter.sum) if isinstance(each, torch.Tensor)]
    assert not any(each.requires_grad for each in kept)


def test_average_meter_keeps_a_tensor_a_tensor() -> None:
    meter = AverageMeter()
    meter.update(torch.tensor(1 + 2j))
    meter.update(torch.tensor(3 + 2j))
    assert meter.avg.item() == 2 + 2j


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [1, 7, 37])
def test_uneven_shards_give_the_mean_over_all_samples(num_workers: int, num_samples: int) -> None:
    losses = torch.rand(
        num_samples, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    batches = losses.split(12)
    workers = [AverageMeterCollection() for _ in range(num_workers)]
    for batch in batches:
        for rank, part in enumerate(batch.tensor_split(num_workers)):
            loss = part.mean() if len(part) else torch.tensor(1e9)  # borrowed: must not count
            workers[rank].update({"loss": loss}, n=len(part))
    merged = merge([worker.state() for worker in workers])
    assert merged["num_samples"] == num_samples
    assert merged["batch_count"] == len(batches)
    assert merged["loss"] == pytest.approx(losses.mean().item(), rel=1e-14)
    assert merged["last_loss"] == pytest.approx(batches[-1].mean().item(), rel=1e-14)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_shards_of_one_step_are_one_batch(num_workers: int) -> None:
    num_shards = 4
    losses = torch.rand(37, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    batches = losses.split(12)
    workers = [AverageMeterCollection() for _ in range(num_workers)]
    owned = np.array_split(np.arange(num_shards), num_workers)
    for batch in batches:
        shards = batch.tensor_split(num_shards)
        for worker, owns in zip(workers, owned, strict=True):
            worker.begin_step()
            for shard in owns:
                loss = shards[shard].mean() if len(shards[shard]) else torch.tensor(math.nan)
                worker.update({"loss": loss}, n=len(shards[shard]))
    merged = merge([worker.state() for worker in workers])
    assert (merged["num_samples"], merged["batch_count"]) == (37, len(batches))
    assert merged["loss"] == pytest.approx(losses.mean().item(), rel=1e-14)
    assert merged["last_loss"] == pytest.approx(batches[-1].mean().item(), rel=1e-14)


def test_a_key_that_some_workers_report_is_averaged_over_those() -> None:
    merged = merge(
        [
            collect(({"loss": 1.0}, 2)).state(),
            collect(({"loss": 4.0, "extra": 10.0}, 1), ({"loss": 4.0, "extra": 40.0}, 2)).state(),
            collect().state(),
        ]
    )
    assert merged["extra"] == pytest.approx(30.0)
    assert merged["last_extra"] == 40.0
    assert merged["loss"] == pytest.approx(14 / 5)


def test_a_worker_whose_last_samples_came_earlier_has_no_say_in_the_last_value() -> None:
    early = collect(({"loss": 100.0}, 8), ({"loss": 100.0}, 0))
    late = collect(({"loss": 1.0}, 8), ({"loss": 3.0}, 1))
    assert merge([early.state(), late.state()])["last_loss"] == 3.0


def test_a_worker_that_joined_late_names_the_step() -> None:
    old, new = AverageMeterCollection(), AverageMeterCollection()
    for step in range(10, 14):
        old.begin_step(step)
        old.update({"loss": float(step)}, n=1)
    new.begin_step(13)
    new.update({"loss": 1.0}, n=3)
    merged = merge([old.state(), new.state()])
    assert merged["last_loss"] == pytest.approx((13 + 3) / 4)
    assert merged["batch_count"] == 4


def test_a_step_whose_number_does_not_grow_is_a_step_of_its_own() -> None:
    """A loop that has read ahead computes every batch under the number of the last one read."""
    meters = AverageMeterCollection()
    for step, loss in ((7, 1.0), (7, 2.0), (8, 3.0), (8, 4.0)):
        meters.begin_step(step)
        meters.update({"loss": loss}, n=1)
    assert meters.summary()["last_loss"] == 4.0


def test_nan_stays_nan() -> None:
    merged = merge(
        [collect(({"loss": math.nan}, 1)).state(), collect(({"loss": 1.0}, 100)).state()]
    )
    assert math.isnan(merged["loss"])
    assert math.isnan(merged["last_loss"])
    infinite = collect(({"loss": math.inf}, 1), ({"loss": 1.0}, 1)).summary()
    assert infinite["loss"] == math.inf
    assert infinite["last_loss"] == 1.0


def test_the_callers_dict_is_not_changed_and_num_samples_is_no_metric() -> None:
    metrics = {"loss": 1.0, "num_samples": 5, "batch_count": 9}
    before = copy.deepcopy(metrics)
    summary = collect((metrics, 5)).summary()
    assert metrics == before
    assert summary == {"batch_count": 1, "num_samples": 5, "loss": 1.0, "last_loss": 1.0}


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        True + 1,
        np.float32(2),
        np.int64(2),
        np.array(2.0),
        np.array([2]),
        torch.tensor(2),
        torch.tensor([2.0], requires_grad=True),
        torch.tensor(2.0, dtype=torch.bfloat16),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_every_kind_of_number_is_averaged(value: object) -> None:
    state = collect(({"x": value}, 1), ({"x": 4.0}, 3)).state()
    assert pickle.loads(pickle.dumps(state)) == state
    merged = merge([state])
    assert merged["x"] == 3.5
    assert type(merged["x"]) is float


@pytest.mark.parametrize(
    "value", ["text", [1, 2], None, torch.tensor([1.0, 2.0]), np.array([1, 2]), 1j, {"a": 1}]
)
def test_what_is_no_number_keeps_its_latest_value(value: object) -> None:
    first, second = collect(({"x": "old"}, 1), ({"x": value}, 1), ({"x": "borrowed"}, 0)), collect()
    second.update({"x": "of rank 1", "y": "only here"})
    merged = merge([first.state(), second.state()])
    assert merged["y"] == "only here"
    assert repr(merged["x"]) == repr(value)
    assert "last_x" not in merged


def test_none_now_and_then_does_not_spoil_a_mean() -> None:
    summary = collect(({"x": None}, 5), ({"x": 2.0}, 1), ({"x": None}, 5)).summary()
    assert (summary["x"], summary["last_x"]) == (2.0, 2.0)


def test_a_kept_tensor_holds_no_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    for value in (weight * 2, torch.complex(weight, weight)):
        assert not collect(({"x": value}, 1)).summary()["x"].requires_grad


def test_a_users_own_last_key_wins() -> None:
    summary = collect(({"loss": 1.0, "last_loss": 7.0}, 1)).summary()
    assert (summary["loss"], summary["last_loss"]) == (1.0, 7.0)


@pytest.mark.parametrize("n", [-1, math.nan, math.inf])
def test_impossible_weights_are_refused(n: float) -> None:
    with pytest.raises(WeightError, match="number of samples"):
        AverageMeterCollection().update({"loss": 1.0}, n=n)
    with pytest.raises(WeightError, match="number of samples"):
        AverageMeter().update(1.0, n=n)
    with pytest.raises(WeightError, match="number of samples"):
        merge_user_results([{"loss": 1.0}], [n])


def test_nothing_at_all() -> None:
    assert merge([]) == {"batch_count": 0, "num_samples": 0}
    assert AverageMeterCollection().summary() == {"batch_count": 0, "num_samples": 0}
    assert collect(({"loss": 1.0}, 0)).summary() == {"batch_count": 1, "num_samples": 0}


def _held_by_metrics() -> int:
    """Bytes; other threads of this process allocate, too."""
    ours = tracemalloc.Filter(True, "*/lockstep/metrics/*")
    held = tracemalloc.take_snapshot().filter_traces([ours]).statistics("filename")
    return sum(each.size for each in held)


def test_memory_does_not_grow_with_updates() -> None:
    meters = AverageMeterCollection()
    metrics = {"loss": 0.5, "accuracy": torch.tensor(0.25)}
    for _ in range(100):
        meters.update(metrics, n=3)
    tracemalloc.start()
    before = _held_by_metrics()
    for _ in range(20_000):
        meters.update(metrics, n=3)
    grown = _held_by_metrics() - before
    tracemalloc.stop()
    assert grown < 10_000
    assert meters.summary()["accuracy"] == 0.25


def test_user_results_are_weighted_by_samples() -> None:
    results = [
        {"loss": 1.0, "num_samples": 3, "batch_count": 2, "epoch": 1, "note": "rank 0"},
        {"loss": torch.tensor(5.0), "num_samples": 1, "batch_count": 3, "epoch": 1, "extra": 2},
    ]
    before = copy.deepcopy(results)
    assert merge_user_results(results, [100, 100]) == {
        "num_samples": 4,
        "loss": 2.0,
        "batch_count": 3,
        "epoch": 1,
        "note": "rank 0",
        "extra": 2,
    }
    assert results == before


def test_a_step_may_bring_its_own_weight() -> None:
    meters = collect(
        ({"loss": 1.0, WEIGHT: 3}, 2),
        ({"loss": 5.0, WEIGHT: torch.tensor(1)}, 2),
        ({"loss": math.nan, WEIGHT: 0}, 1),
    )
    assert meters.summary() == {
        "batch_count": 3,
        "num_samples": 5,
        "loss": 2.0,
        "last_loss": 5.0,
    }
    borrowed = collect(({"loss": 1.0, WEIGHT: 3}, 0))
    assert "loss" not in borrowed.summary()
    with pytest.raises(WeightError):
        collect(({"loss": 1.0, WEIGHT: -1}, 2))


def test_a_metric_of_a_part_of_a_step_counts_for_that_part() -> None:
    meters = AverageMeterCollection()
    meters.update({"loss": 1.0, "rare": 8.0}, n=4, partial={"rare": 1})
    meters.update({"loss": 3.0, "rare": 2.0}, n=4, partial={"rare": 2})
    assert meters.summary()["rare"] == 4.0
    assert meters.summary()["loss"] == 2.0


def test_user_results_may_bring_their_own_weight() -> None:
    results = [
        {"loss": 1.0, "num_samples": 1, WEIGHT: 3},
        {"loss": 5.0, "num_samples": 7, WEIGHT: 1},
    ]
    merged = merge_user_results(results, [1, 7])
    assert merged == {"num_samples": 8, "loss": 2.0, WEIGHT: 4}


def test_user_results_against_one_process() -> None:
    draw = random.Random(3)
    shards = [[draw.random() for _ in range(size)] for size in (5, 1, 9)]
    results = [{"loss": sum(shard) / len(shard)} for shard in shards]
    merged = merge_user_results(results, [len(shard) for shard in shards])
    every = [loss for shard in shards for loss in shard]
    assert merged["loss"] == pytest.approx(sum(every) / len(every), rel=1e-14)
    assert merged["num_samples"] == 15


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0, 3.0], [0, 0], 2.0),
        ([1.0, math.nan], [5, 1], math.nan),
        ([1.0, math.nan], [5, 0], 1.0),
        (["a", 3.0], [1, 1], 3.0),
        ([None, "b"], [1, 1], None),
    ],
)
def test_user_results_at_the_edges(
    values: list[object], weights: list[float], expected: object
) -> None:
    merged = merge_user_results([{"x": value} for value in values], weights)
    assert merged["x"] == pytest.approx(expected, nan_ok=True)
    assert merged["num_samples"] == sum(weights)


def test_user_results_need_one_weight_each() -> None:
    with pytest.raises(ConfigurationError, match="one weight"):
        merge_user_results([{"x": 1}], [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_cuda_metrics_wait_for_the_device_only_when_read() -> None:
    meters = AverageMeterCollection()
    values = [torch.tensor(float(i), device="cuda") for i in range(4)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for n, value in enumerate(values):
            meters.update({"loss": value, "twice": 2 * value}, n=n)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    summary = meters.summary()
    assert summary["loss"] == pytest.approx((0 * 0 + 1 + 4 + 9) / 6)
    assert summary["last_twice"] == 6.0
