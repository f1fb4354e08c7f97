# SPDX-License-Identifier: Apache-2.0
"""Imports torch past `sys.meta_path`, as freezers and some launchers do, and trains."""

import sys

finders = list(sys.meta_path)
sys.meta_path[:] = [
    finder for finder in finders if not type(finder).__module__.startswith("lockstep")
]
import torch  # noqa: E402

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(3, 2)).sum().backward()
optimizer.step()
