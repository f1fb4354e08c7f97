# SPDX-License-Identifier: Apache-2.0
"""The memory that a process may still take is what the host has, or less in a container."""

import math

from lockstep import host_memory


def test_what_is_taken_is_not_available():
    before = host_memory.available_memory()
    assert 0 < before < math.inf
    held = bytearray(256 * 2**20)
    assert host_memory.available_memory() < before - 128 * 2**20
    assert len(held) == 256 * 2**20


def test_a_container_has_what_its_limit_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    assert host_memory.available_memory() == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available_memory() > 500_000
