# SPDX-License-Identifier: Apache-2.0
"""What earlier versions have written is read, and a run goes on from it as it did then.

The numbers are those of the version that wrote the files, on the machine and the torch of then.
"""

import json
from pathlib import Path

import pytest
import torch
from tests.released.program import STEPS_AFTER, STEPS_BEFORE, rank_loader, train_on, trainer
from tests.torch_versions import needs_unit_hooks

from lockstep import checkpoint
from lockstep.trainer.logged_run import LoggedRun

pytestmark = pytest.mark.timeout(240)  # it may be the first here to start Ray

FOLDERS = sorted(path.parent for path in Path(__file__).parent.glob("*/expected.json"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request):
    return request.param


def expected_of(folder, part):
    return json.loads((folder / "expected.json").read_text())[part]


def assert_same(found, expected):
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, values in expected["weights"].items():
        assert found["weights"][name] == pytest.approx(values, rel=1e-9, abs=1e-9)


def test_there_are_files():
    assert FOLDERS


def test_a_run_goes_on_from_a_file(folder):
    with trainer(use_local=True) as run:
        run.load(folder / "file.pt")
        assert_same(train_on(run), expected_of(folder, "file"))
        (seen,) = run.apply_all_operators(lambda operator: operator.seen.item())
        average = run.get_averaged_model()
    assert seen == STEPS_BEFORE + STEPS_AFTER
    assert all(value.isfinite().all() for value in average.state_dict().values())


@needs_unit_hooks
@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 1])
def test_a_run_goes_on_from_a_directory(folder, num_workers):
    with trainer(in_shards=True, sync="fsdp", num_workers=num_workers) as run:
        run.load(folder / "directory")
        assert_same(train_on(run), expected_of(folder, "directory"))


def test_a_directory_becomes_a_file(folder, tmp_path):
    file = checkpoint.convert(folder / "directory", tmp_path / "file.pt")
    read, found = checkpoint.read(folder / "directory"), torch.load(file, weights_only=True)
    for name, value in read["models"][0].items():
        assert torch.equal(found["models"][0][name], value)


def test_a_loader_goes_on_from_its_position(folder):
    loader = rank_loader()
    loader.load_state_dict(json.loads((folder / "loader.json").read_text()))
    assert [batch.tolist() for batch in loader] == expected_of(folder, "loader")


def test_the_log_of_a_run_is_read(folder):
    log = LoggedRun.read(folder)
    assert list(log.steps) == list(range(1, STEPS_BEFORE + 1))
    assert log.config_of(STEPS_BEFORE) == {}
