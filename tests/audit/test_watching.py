# SPDX-License-Identifier: Apache-2.0
"""`lockstep.audit.watching`, by itself and inside the trainers of other libraries.

The tests of trainers are slow: each starts two processes that import a whole library, and trains
four models. `make test-all` installs the libraries.
"""

import json
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.optim import optimizer

import lockstep.audit
from lockstep.errors import AuditError, ConfigurationError, WrongUseError

HERE = Path(__file__).parent / "watched"
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [
    "accelerate.commands.accelerate_cli",
    "launch",
    "--multi_gpu",  # its word for processes of its own; the script trains on CPUs
    "--num_processes",
    "2",
    "--main_process_port",
    "0",
]
PROGRAMS = {
    "transformers_trainer": (TORCHRUN, "LS101", "layers.0.weight"),
    "lightning_trainer": (TORCHRUN, "LS102", "scale"),
    "fabric_loop": (TORCHRUN, "LS101", "0.weight"),
    "accelerate_loop": (ACCELERATE, "LS101", "0.weight"),
}
"""How each is launched, the code of what is wrong in it, and the first parameter concerned."""


def _train(gradient=1.0):
    weight = torch.nn.Parameter(torch.ones(3))
    made = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        made.zero_grad()
        (weight * gradient).sum().backward()
        made.step()


def test_a_healthy_block_is_in_lockstep_and_says_so_quietly(caplog):
    with caplog.at_level(logging.INFO, "lockstep"), lockstep.audit.watching() as watch:
        _train()
    assert watch.findings == []
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "3 steps, 1 rank" in record.getMessage()


def test_what_is_found_is_kept_logged_and_raised_if_asked_for(caplog):
    watch = lockstep.audit.watching(fail_on="error")
    with pytest.raises(AuditError) as raised, watch:
        _train(gradient=float("nan"))
    assert [found.code for found in watch.findings] == ["LS115"]
    assert raised.value.code == "LS115"
    assert raised.value.findings == tuple(watch.findings)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "error [LS115]" in caplog.text
    with watch:  # once more: what was found before is forgotten
        _train()
    assert watch.findings == []


@pytest.mark.parametrize("options", [{"ignore": ("LS1",)}, {"only": ("LS5",)}])
def test_what_was_not_asked_for_is_left_out_and_counted(options, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    with lockstep.audit.watching(**options, fail_on="error") as watch:
        _train(gradient=float("nan"))
    assert watch.findings == []
    assert "left out: 1 error (LS115)" in caplog.text


def test_an_exception_passes_and_leaves_no_watch_behind():
    watch = lockstep.audit.watching(fail_on="error")
    with pytest.raises(KeyError, match="mine"), watch:
        _train(gradient=float("nan"))
        raise KeyError("mine")
    assert watch.findings == []
    assert not optimizer._global_optimizer_pre_hooks
    with lockstep.audit.watching():
        _train()


def test_a_watch_within_a_watch_is_refused_and_the_outer_one_goes_on():
    with lockstep.audit.watching() as outer:
        with pytest.raises(WrongUseError), lockstep.audit.watching():
            pass
        _train()
    assert outer.findings == []


@pytest.mark.parametrize("wrong", [{"mode": "ful"}, {"fail_on": "notice"}])
def test_a_wrong_option_is_refused_before_training(wrong):
    with pytest.raises(ConfigurationError, match="does not exist"):
        lockstep.audit.watching(**wrong)


ONE_RAISES = """
import torch
import torch.distributed as dist
import lockstep.audit

dist.init_process_group("gloo")
rank = dist.get_rank()

def train():
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 1)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        made.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        made.step()

try:
    with lockstep.audit.watching():
        train()
        if rank == 1:
            raise KeyError("mine")
except KeyError:
    pass
with lockstep.audit.watching() as watch:
    train()
codes = [found.code for found in watch.findings]
assert "LS101" in codes, codes  # found by comparing both ranks
assert "LS602" not in codes, codes
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_that_raises_is_not_waited_for_and_the_next_watch_is_of_all_ranks(tmp_path):
    """Slow: it starts two processes."""
    script = tmp_path / "one_raises.py"
    script.write_text(ONE_RAISES)
    _run([*TORCHRUN, str(script)], tmp_path)


def _run(words, folder):
    done = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_is_watched(name, tmp_path):
    launcher, code, parameter = PROGRAMS[name]
    _run([*launcher, str(HERE / f"{name}.py"), str(tmp_path)], tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    for held in (first, second):
        assert held["world size"] == 2
        assert held["with"] == held["without"]
        assert held["findings"] == []
        assert held["wrong"][0]["code"] == code
        assert held["wrong"][0]["parameters"][0].endswith(parameter)
        assert held["raised"].startswith(f"[{code}]")
        assert held["passed"] == "'no such row'"
        assert held["nothing is left"]
    assert first["with"] == second["with"]
    assert first["wrong"] == second["wrong"]
    assert [level for level, _ in first["logged"]] == ["INFO", "WARNING"]
    assert "in lockstep" in first["logged"][0][1]
    assert second["logged"] == []


@pytest.mark.slow
def test_an_unmodified_script_is_watched_under_accelerate(tmp_path):
    """Slow: it starts two processes, which import Accelerate."""
    script = HERE.parent / "real" / "accelerate_accumulation.py"
    said = _run([*ACCELERATE, "-m", "lockstep.audit", str(script)], tmp_path)
    assert "2 ranks" in said
    assert "in lockstep" in said


BYPASSED = Path(__file__).parents[2] / "docs" / "programs" / "bypassed.py"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "watch-inside-other-trainers.md"


@pytest.mark.slow
def test_a_task_of_slurms_is_a_rank_with_the_variables_that_the_page_exports(tmp_path):
    """Slow: it starts two processes. They are started by hand, with what Slurm tells a task."""
    lines = re.search(r"^(export AS_RANK=.*)\nsrun (.*)$", PAGE.read_text(), re.MULTILINE)
    exported, typed = lines.groups()
    typed = typed.replace(" python ", f" {sys.executable} ").replace("train.py", str(BYPASSED))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tasks = [
        subprocess.Popen(
            ["bash", "-c", f"{exported}\n{typed}"],
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task),
                "SLURM_NTASKS": "2",
            },
        )
        for task in range(2)
    ]
    first, second = (task.communicate(timeout=200)[1] for task in tasks)
    assert [task.returncode for task in tasks] == [0, 0], first + second
    assert "2 ranks" in first
    assert "error [LS101]" in first
    assert "lockstep audit:" not in second
