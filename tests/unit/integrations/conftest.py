# SPDX-License-Identifier: Apache-2.0
"""One thread: on tensors this small several only wait for each other, for most of the time."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
