# SPDX-License-Identifier: Apache-2.0
"""Deterministic arithmetic: the same kernels and number of threads on every worker."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from lockstep._torch_compat import COMPILERS_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENVIRONMENT: Final = {
    "TORCHINDUCTOR_DETERMINISTIC": "1",  # when the compiler is imported
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # when cuBLAS starts; as torch asks for
}
_WARN: Final = 1
_ERROR: Final = 2


@contextmanager
def deterministic_mode(threads: int | None) -> Iterator[None]:
    """Inside, torch uses deterministic algorithms, and `threads` threads for an operation.

    The number of threads that share a sum decides its bits, so a worker in the driver's process
    must not use more threads than an actor with one CPU does. All settings are restored at the end.
    """
    mode = torch.get_deterministic_debug_mode()
    benchmark, count = torch.backends.cudnn.benchmark, torch.get_num_threads()
    unset = _ENVIRONMENT.keys() - os.environ.keys()
    os.environ.update({name: _ENVIRONMENT[name] for name in unset})
    _set_mode(_ERROR)
    torch.backends.cudnn.benchmark = False
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        _set_mode(mode)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(count)
        for name in unset:
            os.environ.pop(name, None)


def _set_mode(mode: int) -> None:
    """As `use_deterministic_algorithms`, without its slow import of torch's compiler."""
    if COMPILERS_SETTINGS in sys.modules:
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == _WARN)
    else:
        torch.set_deterministic_debug_mode(mode)
