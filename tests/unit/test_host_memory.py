# SPDX-License-Identifier: Apache-2.0
"""The memory that a process may still take is what the host has, or less in a container."""

import math
import os

from lockstep import host_memory


def test_a_host_has_less_than_all_of_its_memory():
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < host_memory.available_memory() < whole


def test_a_host_has_what_its_kernel_says_can_be_had(tmp_path, monkeypatch):
    # Of a file, and not of this machine: other processes take and free memory meanwhile.
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemFree: 10 kB\nMemAvailable:    300 kB\nCached: 20 kB\n")
    assert host_memory.available_memory() == 300 * 1024
    (tmp_path / "meminfo").unlink()
    assert host_memory.available_memory() == math.inf


def test_a_container_has_what_its_limit_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    assert host_memory.available_memory() == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available_memory() > 500_000
