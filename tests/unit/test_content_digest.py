# SPDX-License-Identifier: Apache-2.0
"""Tests of `content_digest`: equal contents have equal digests, and others do not."""

import numpy as np
import torch

from lockstep.content_digest import content_digest


def test_a_digest_tells_contents_apart() -> None:
    values = [
        torch.ones(2), torch.zeros(2), torch.ones(3), torch.tensor(1, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64), torch.tensor([True]), np.ones(2), [1, 2], (1, 2),
        {"a": 1}, {"b": 1}, "text", 1, 1.5, None, [[1], [2]], [[1, 2]], [np.int64(3)],
        [np.int64(4)], torch.ones(2, 3), torch.ones(3, 2),
    ]  # fmt: skip
    digests = [content_digest(value) for value in values]
    assert len(set(digests)) == len(values)
    assert content_digest(object()) == content_digest(object())
