# SPDX-License-Identifier: Apache-2.0
"""What tests need of torch; `make matrix` runs them under older versions, too."""

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep._torch_compat.fully_shard import NEEDED_METHODS

needs_unit_hooks = pytest.mark.skipif(
    not all(hasattr(FSDPModule, name) for name in NEEDED_METHODS),
    reason="models in units need torch 2.13; `test_an_older_torch_is_named` sees the refusal",
)

needs_linear_cross_entropy = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyLoss"),
    reason="`LinearCrossEntropyLoss` is new in torch 2.13",
)
