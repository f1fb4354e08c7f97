# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory becomes a file, without the memory for it, and a file a directory."""

import os
import threading
from pathlib import Path

import torch

from lockstep import checkpoint
from lockstep.tensor_tree import leaves_of

STATE = {
    "models": [{"weight": torch.arange(6.0).view(2, 3), "empty": torch.zeros(0)}],
    "flags": torch.tensor([True, False]),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "step": 3,
}


def is_same(one, other):
    pairs = zip(leaves_of(one), leaves_of(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_a_directory_becomes_a_file_and_a_file_a_directory(tmp_path):
    path = checkpoint.write_directory(tmp_path / "state", STATE)
    file = checkpoint.convert(path, tmp_path / "new" / "state.pt")
    assert is_same(torch.load(file, weights_only=True), STATE)
    assert os.listdir(tmp_path / "new") == ["state.pt"]
    back = checkpoint.convert(file, tmp_path / "back")
    assert os.path.isdir(back)
    assert is_same(checkpoint.read(back), STATE)


def anonymous_memory():
    """What this process has of its own, beside pages of files, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise OSError("no RssAnon in /proc/self/status")


def test_what_is_converted_need_not_fit_into_memory(tmp_path):
    state = {str(number): torch.full((5 * 2**19,), float(number)) for number in range(16)}
    path = checkpoint.write_directory(tmp_path / "state", state)
    before, peak, is_over = anonymous_memory(), [0], threading.Event()

    def watch():
        while not is_over.wait(0.001):
            peak[0] = max(peak[0], anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    checkpoint.convert(path, tmp_path / "state.pt")
    is_over.set()
    watcher.join()
    assert peak[0] - before < 80 * 2**20  # of 160 MiB, 10 in each tensor
    assert is_same(checkpoint.read(tmp_path / "state.pt"), state)
