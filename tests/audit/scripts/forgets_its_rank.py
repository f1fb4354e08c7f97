# SPDX-License-Identifier: Apache-2.0
"""Whose ledger is whose is for the launcher to say."""

import os

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
    del os.environ[name]

import torch  # noqa: E402

torch.zeros(1)
