# SPDX-License-Identifier: Apache-2.0
"""The probe starts with the script's own import of torch, whoever has asked for torch before."""

import importlib.util
import sys

import pytest

from lockstep.audit.importing import when_imported

NAME = "imported_later"


@pytest.fixture
def called(tmp_path, monkeypatch):
    """How often the callback was called for a module that nobody has imported yet."""
    (tmp_path / f"{NAME}.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    calls = []
    when_imported(NAME, lambda: calls.append(sys.modules[NAME].VALUE))
    yield calls
    sys.modules.pop(NAME, None)


def test_looking_for_a_module_is_not_importing_it(called):
    for _ in range(2):
        spec = importlib.util.find_spec(NAME)
        assert spec is not None
        assert spec.loader.get_filename(NAME) == spec.origin
    assert called == []
    module = importlib.import_module(NAME)
    assert called == [3]
    assert type(module.__loader__).__module__.startswith("_frozen_importlib")
    assert module.__spec__.loader is module.__loader__
    assert not any(type(finder).__name__ == "_Finder" for finder in sys.meta_path)


def test_a_spec_that_was_found_before_may_be_executed(called):
    spec = importlib.util.find_spec(NAME)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    assert called == [3]


def test_an_import_that_fails_may_be_tried_again(called, tmp_path):
    file = tmp_path / f"{NAME}.py"
    file.write_text("raise ValueError(0)\n")
    with pytest.raises(ValueError, match="0"):
        importlib.import_module(NAME)
    assert called == []
    file.write_text("VALUE = 3  # now\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert called == [3]
