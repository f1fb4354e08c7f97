# SPDX-License-Identifier: Apache-2.0
"""Which GPU a worker takes."""

import pytest
import torch

from lockstep.worker.device import pick_device


@pytest.mark.parametrize(
    ("count", "local_rank", "is_here", "expected"),
    [(1, 0, False, 0), (2, 1, False, 1), (1, 1, False, 0), (4, 0, True, 3), (1, 0, True, 0)],
)
def test_rank_0_in_the_driver_leaves_the_first_gpus_to_actors(
    monkeypatch, count, local_rank, is_here, expected
):
    """Ray, which does not know of it, gives them out from the first one on."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    device = pick_device(True, local_rank, is_here)
    assert device == torch.device("cuda", expected)
