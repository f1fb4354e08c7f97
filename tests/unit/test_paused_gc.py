# SPDX-License-Identifier: Apache-2.0
"""The collector is paused while imports or parameters make objects, and afterwards as it was."""

import gc
import subprocess
import sys

import pytest

from lockstep.paused_gc import pause_gc

_FIRST_USE = """
import gc
collected = []
gc.callbacks.append(lambda phase, info: collected.append(phase) if phase == "start" else None)
import lockstep
gc.collect()  # or one that is nearly due anyway would come first
collected.clear()
lockstep.TorchTrainer
print(len(collected), gc.isenabled())
"""


@pytest.mark.timeout(240)
def test_the_first_use_of_a_name_goes_through_its_imports_once_afterwards():
    told = subprocess.run(
        [sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, check=True, timeout=200
    )
    assert told.stdout.split() == ["1", "True"]


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with pause_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_on_again_after_a_failed_import():
    with pytest.raises(ImportError), pause_gc():
        raise ImportError
    assert gc.isenabled()
