# SPDX-License-Identifier: Apache-2.0
"""The names that configuration, batch information and results are keyed by.

The values are those of RaySGD 1.3 (``ray.util.sgd.utils`` and
``ray.util.sgd.torch.constants``), so that configurations carry over unchanged; `WEIGHT` is
lockstep's own.
"""

from typing import Final

BATCH_SIZE: Final = "*batch_size"
"""In ``config``: the *global* batch size, in samples."""

NUM_SAMPLES: Final = "num_samples"
"""In results: how many samples were seen, each counted once over all workers."""

WEIGHT: Final = "*weight"
"""In a step's metrics: the weight of its loss and metrics (tokens), in place of its samples."""

BATCH_COUNT: Final = "batch_count"
"""In results: how many global batches were seen."""

NUM_STEPS: Final = "__num_steps__"
"""In ``info``: the ``num_steps`` of the call, or None for one epoch."""

USE_FP16: Final = "__use_fp16__"
"""In ``info``: whether the call runs in fp16."""

SCHEDULER_STEP: Final = "scheduler_step"
"""In ``info``: when the default loops step the schedulers."""

SCHEDULER_STEP_BATCH: Final = "batch"
SCHEDULER_STEP_EPOCH: Final = "epoch"
SCHEDULER_STEP_MANUAL: Final = "manual"
VALID_SCHEDULER_STEP: Final = frozenset(
    {SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_MANUAL}
)
