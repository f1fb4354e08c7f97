# SPDX-License-Identifier: Apache-2.0
"""`describe_hardware`: what the bits of a result depend on, beside program, versions, threads."""

from __future__ import annotations

import platform
from functools import cache

import torch


def describe_hardware(device: str) -> dict[str, str]:
    """The device by name, the instruction set of torch's CPU kernels, and the processor.

    Args:
        device: as torch writes it, such as ``"cuda:0"``.
    """
    kind = device.partition(":")[0]
    # A driver sees other devices than its workers: of their kind the first one speaks for all.
    is_here = kind == "cuda" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if is_here else kind,
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
    }


@cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine()
