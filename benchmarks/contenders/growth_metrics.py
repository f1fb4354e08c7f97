# SPDX-License-Identifier: Apache-2.0
"""A million steps of metrics: whether a step costs more, and memory grows, with time."""

from __future__ import annotations

import time

import torch

from footprint import private_mb
from lockstep.metrics import AverageMeterCollection
from reporting import report

UP_TO = (1_000, 10_000, 100_000, 1_000_000)


def main() -> None:
    torch.set_num_threads(1)
    meters = AverageMeterCollection()
    metrics = {"train_loss": torch.tensor(0.5), "accuracy": 0.9}
    rows, done = [], 0
    before = private_mb()
    for total in UP_TO:
        start = time.perf_counter()
        for _ in range(total - done):
            meters.update(metrics, n=32)
        each = (time.perf_counter() - start) / (total - done)
        done = total
        rows.append({"steps": total, "each": 1e6 * each, "mebibytes": private_mb() - before})
    report(rows=rows)


if __name__ == "__main__":
    main()
