# SPDX-License-Identifier: Apache-2.0
"""Processes that a script starts itself are watched; those that cannot be are named."""

import json
import multiprocessing.process
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, get_worker_info

from audit.commands import audit, run
from lockstep.audit.facts import Track
from lockstep.audit.interpreters import starts_python
from lockstep.audit.launch import _parsed, _starts_its_own
from lockstep.audit.ledger import Ledger
from lockstep.audit.probe.probe import Probe, default_group
from lockstep.audit.spawned import Children
from lockstep.audit.together import with_spawned

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def found_in(report):
    held = json.loads(report.read_text())
    return {f["code"] for f in held["findings"]}, held["world_size"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("spawns.py", "PORT"),
        ("starts_processes.py", "spawn", "PORT", "function"),
        ("starts_processes.py", "fork", "PORT", "function"),
        ("starts_processes.py", "forkserver", "PORT", "class"),
        ("rank_0_starts_the_others.py", "PORT"),
    ],
    ids=" ".join,
)
def test_ranks_that_the_script_starts_itself_are_watched(tmp_path, port, command):
    report = tmp_path / "report.json"
    script, *arguments = (str(port) if word == "PORT" else word for word in command)
    done = audit("--json", report, SCRIPTS / script, *arguments)
    assert done.returncode == 65, done.stderr
    assert found_in(report) == ({"LS101"}, 2)


@pytest.mark.slow
def test_they_are_under_another_launcher_too(tmp_path, port):
    report = tmp_path / "report.json"
    alone = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "TMPDIR": str(tmp_path)}
    command = ("-m", "lockstep.audit", "--json", report, SCRIPTS / "spawns.py", port)
    done = run(*command, env=alone)
    assert done.returncode == 0, done.stderr
    assert found_in(report) == ({"LS101"}, 2)
    assert not list(tmp_path.glob("lockstep-audit*"))


@pytest.mark.slow
def test_processes_that_share_one_model_have_met(tmp_path):
    report = tmp_path / "report.json"
    done = audit("--json", report, "--nproc-per-node", 1, SCRIPTS / "shares_its_model.py")
    assert done.returncode == 0, done.stderr
    assert found_in(report) == (set(), 2)
    assert json.loads(report.read_text())["steps"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("forks", 66, "that the script forked"),
        ("replaces itself", 66, "replaced itself"),
        ("is killed", 66, "ended before it wrote its record"),
        ("a pool", 66, "ended before it wrote its record"),
        ("Popen", 66, "started Python by `subprocess.Popen`"),
        ("a shell", 66, "started Python by `subprocess.Popen`"),
        ("trains and starts", 0, "one process trained"),
        ("only starts", 0, "no backward ran"),
    ],
)
def test_what_cannot_be_watched_is_named(how, code, said):
    done = audit("--nproc-per-node", 1, SCRIPTS / "trains_elsewhere.py", how)
    assert done.returncode == code, done.stderr
    assert said in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_hang_of_ranks_that_the_script_started_ends(tmp_path, port):
    report = tmp_path / "report.json"
    script = SCRIPTS / "spawned_ranks_wait.py"
    options = ("--hang-timeout", "1", "--json", report)
    done = audit(*options, script, port, env={**os.environ, "LOCKSTEP_AUDIT_STALL_S": "1"})
    assert done.returncode == 65, done.stderr
    assert "the ranks hang, and are ended" in done.stderr
    assert found_in(report) == ({"LS601"}, 2)


@pytest.mark.slow
def test_a_process_that_ranks_fork_is_no_rank(tmp_path):
    report = tmp_path / "report.json"
    done = audit("--json", report, SCRIPTS / "forks_beside_training.py")
    assert done.returncode == 0, done.stderr
    assert found_in(report) == (set(), 2)


def test_a_group_counts_if_this_process_made_it():
    def begin():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        probe.note_group()
        return probe.ledger.started_group

    probe = Probe()
    try:
        assert begin()
        probe = Probe()
        probe.inherited = default_group()
        probe.note_group()
        assert not probe.ledger.started_group
        dist.destroy_process_group()
        assert begin()
    finally:
        dist.destroy_process_group()


class Workers:
    """Samples that tell what a worker's process is made of."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return "run" in vars(multiprocessing.process.current_process())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_workers_of_data_loaders_stay_as_they_are(tmp_path, monkeypatch, method):
    for owner, name in [
        (multiprocessing.process.BaseProcess, "start"),
        (subprocess.Popen, "__init__"),
        *((os, n) for n in ("system", "posix_spawn", "execv", "execve", "execvp", "execvpe")),
    ]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    Children(tmp_path / "none", 0, None, lambda: None).watch()
    loader = DataLoader(Workers(), num_workers=1, multiprocessing_context=method)
    assert [any(batch) for batch in loader] == [False, False]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("command", "is_python"),
    [
        ([sys.executable, "train.py"], True),
        (["python3.12", "-u", "train.py"], True),
        (["env", "A=1", "torchrun", "train.py"], True),
        ("cd x && true; python train.py", True),
        (["nvidia-smi"], False),
        (["git", "log", "python"], False),
        (["true"], False),
        ([sys.executable, "-m", "torch._inductor.compile_worker"], False),
    ],
)
def test_which_commands_start_python(command, is_python):
    assert starts_python(command) is is_python


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("mp.spawn(train, nprocs=2)", True),
        ("Process(target=f)\ninit_process_group('gloo', rank=rank, world_size=2)", True),
        ("Process(target=log)\ninit_process_group('gloo')", False),
        ("init_process_group('gloo', rank=int(os.environ['RANK']))", False),
    ],
)
def test_a_script_that_starts_its_ranks_is_started_once(tmp_path, text, is_told):
    script = tmp_path / "script.py"
    script.write_text(text)
    assert _starts_its_own(_parsed(script)) is is_told


def trained(rank, *, grouped):
    return Ledger(rank=rank, started_group=grouped, tracks=[Track("SGD#0", "SGD", [])])


def test_ranks_of_the_same_numbers_are_not_mixed():
    """Each of two launched ranks started two: the second pair is named, and not compared."""
    own = [Ledger(rank=0), Ledger(rank=1)]
    spawned = [trained(rank, grouped=True) for rank in (0, 1, 0, 1)]
    found = with_spawned(own, spawned)
    assert found[0] is spawned[0]
    assert found[1] is spawned[1]
    assert len(found) == 2
    assert "--nproc-per-node 1" in found[0].facts.blind


def test_a_helper_of_ranks_is_no_rank():
    own = [trained(rank, grouped=True) for rank in (0, 1)]
    assert with_spawned(own, [trained(0, grouped=False)]) == own


def test_processes_without_a_group_are_numbered():
    found = with_spawned([Ledger(rank=0)], [trained(rank, grouped=False) for rank in (1, 0)])
    assert [ledger.rank for ledger in found] == [0, 1]
