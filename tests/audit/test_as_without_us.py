# SPDX-License-Identifier: Apache-2.0
"""A program that is audited is what it is without us: modules, threads, children, its leftovers."""

import json
import os
import signal
import subprocess
import sys

import pytest

from audit.commands import audit, run
from lockstep.cli import main

STEPS = """
def train():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        weight.grad = torch.ones(3)
        optimizer.step()
"""

ITSELF = """
import sys
from . import beside
names = [__name__, __package__, __spec__.name, __file__, __cached__, type(__loader__).__name__]
print(names, sys.argv, sys.path[0], beside.__name__)
sys.exit(beside.CODE)
"""


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "their" / "inner"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").write_text("")
    (folder / "beside.py").write_text("CODE = 3")
    (folder / "program.py").write_text(ITSELF)
    (folder / "__main__.py").write_text(ITSELF)
    return tmp_path


@pytest.mark.parametrize("name", ["their.inner.program", "their.inner"])
def test_a_module_is_what_python_m_makes_of_it(package, name):
    expected = run("-m", name, "--lr", "0.1", cwd=package)
    assert expected.returncode == 3, expected.stderr
    done = audit("--nproc-per-node", "1", "-m", name, "--lr", "0.1", cwd=package)
    assert done.stdout == expected.stdout
    assert done.returncode == 3


@pytest.mark.parametrize("name", ["their.other", "other.program", "their", "their.inner.beside.py"])
def test_of_a_module_that_cannot_be_run_is_said_what_python_says(package, name):
    expected = run("-m", name, cwd=package)
    done = audit("--nproc-per-node", "1", "-m", name, cwd=package)
    assert done.returncode == expected.returncode == 1
    assert expected.stderr in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("raised", ["import not_installed", "1 / 0", "raise SystemExit(5)"])
def test_what_a_package_raises_is_shown_as_without_us(package, raised):
    (package / "their" / "__init__.py").write_text(raised)
    expected = run("-m", "their.inner", cwd=package)
    done = audit("--nproc-per-node", "1", "-m", "their.inner", cwd=package)
    assert done.returncode == expected.returncode
    theirs, _, _ = done.stderr.partition("lockstep audit: ")
    assert theirs.splitlines()[-2:] == expected.stderr.splitlines()[-2:]
    assert "/lockstep/audit" not in theirs


def test_a_package_is_preferred_to_a_file_beside_it_as_python_does(package):
    (package / "their" / "inner.py").write_text("def f(:\n")
    assert audit("--nproc-per-node", "1", "-m", "their.inner", cwd=package).returncode == 3


def test_a_command_that_can_be_read_once_is_run(tmp_path):
    program = tmp_path / "starts.py"
    program.write_text(
        "import subprocess\nsubprocess.run(map(str, ['echo', 1]), check=True)\n"
        "subprocess.run(args=iter(['echo', '2']), check=True)\n"
    )
    done = audit("--nproc-per-node", "1", program)
    assert done.stdout.split() == ["1", "2"], done.stderr
    assert done.returncode == run(program).returncode == 0


def test_an_interrupt_is_reported_when_nobody_reads_what_is_printed(tmp_path):
    report = tmp_path / "report.json"
    (tmp_path / "waits.py").write_text("print('here', flush=True)\ninput()")
    words = ["--nproc-per-node", "1", "--json", report, tmp_path / "waits.py"]
    command = [sys.executable, "-m", "lockstep.cli", "audit", *words]
    pipe, (reading, writing) = subprocess.PIPE, os.pipe()
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=writing) as running:
        assert running.stdout.readline() == b"here\n"
        os.close(reading)
        os.close(writing)
        running.send_signal(signal.SIGTERM)
        running.stdout.read()
    assert json.loads(report.read_text())["world_size"] == 1


def test_a_file_after_m_is_refused_before_it_runs(package, monkeypatch, capsys):
    (package / "train.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(package)
    assert main(["audit", "-m", "train.py"]) == 2
    assert "train.py is a file, and -m takes the name of a module" in capsys.readouterr().err


def test_a_module_with_a_syntax_error_is_shown_once(package, monkeypatch, capsys):
    (package / "their" / "wrong.py").write_text("def f(:\n")
    monkeypatch.chdir(package)
    assert main(["audit", "-m", "their.wrong"]) == 1
    assert capsys.readouterr().err.count("SyntaxError") == 1


@pytest.mark.slow
def test_steps_of_a_thread_that_python_waits_for_are_seen(tmp_path):
    script = tmp_path / "threaded.py"
    later = "def later():\n    threading.main_thread().join()\n    train()\n"
    started = f"{later}threading.Thread(target=later).start()"
    script.write_text(f"import threading\nimport torch\n{STEPS}\n{started}")
    report = tmp_path / "report.json"
    done = audit("--nproc-per-node", "1", "--json", report, script)
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text())["steps"] == 3


LEAVES = """
import os, subprocess, sys
held = os.open(sys.argv[1], os.O_WRONLY)
waits = [sys.executable, "-c", "import signal; signal.pause()"]
null = subprocess.DEVNULL
print(subprocess.Popen(waits, stdin=null, stdout=null, stderr=null, pass_fds=[held]).pid)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("code", "runs_on"), [(0, True), (1, False)])
def test_what_a_script_leaves_running_runs_on_only_if_the_script_ended_well(
    tmp_path, code, runs_on
):
    script, held = tmp_path / "leaves.py", tmp_path / "held"
    script.write_text(LEAVES)
    os.mkfifo(held)
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    done = audit("--nproc-per-node", "1", "--fail-on", "never", script, held, code)
    assert done.returncode == code
    try:
        ended = os.read(reading, 1) == b""
    except BlockingIOError:  # somebody can still write
        ended = False
        os.kill(int(done.stdout), signal.SIGKILL)
    os.close(reading)
    assert ended != runs_on


@pytest.mark.slow
def test_a_fork_that_goes_through_the_end_of_the_script_does_not_report(tmp_path):
    script = tmp_path / "forks.py"
    script.write_text(f"import os\nimport torch\n{STEPS}\ntrain()\nif os.fork():\n    os.wait()")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = run("-m", "lockstep.audit", script, env={**os.environ, **alone})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("lockstep audit: ") == 1


def test_a_launcher_that_is_killed_leaves_no_folder(tmp_path):
    # One write a rank: an unbuffered `print` is two, and ranks share the pipe.
    (tmp_path / "waits.py").write_text("import os\nos.write(1, b'here\\n')\ninput()")
    command = [sys.executable, "-m", "lockstep.cli", "audit", tmp_path / "waits.py"]
    pipe = subprocess.PIPE
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as running:
        assert running.stdout.readline() == b"here\n"
        assert list(tmp_path.glob("lockstep-audit-*"))
        running.send_signal(signal.SIGKILL)
        running.stdout.read()  # until the last rank has ended
    assert not list(tmp_path.glob("lockstep-audit-*"))


LINE_SEARCH = """
import torch

class Searches(torch.optim.SGD):
    def step(self, closure):
        with torch.enable_grad():
            loss = closure(backward=True)
        super().step()
        return loss - closure(False)

def closure(backward):
    loss = weight.square().sum()
    if backward:
        optimizer.zero_grad()
        loss.backward()
    return loss

weight = torch.nn.Parameter(torch.ones(3))
optimizer = Searches([weight], lr=0.1)
print([round(optimizer.step(closure).item(), 4) for _ in range(2)])
"""


@pytest.mark.slow
def test_a_closure_gets_the_arguments_that_its_optimizer_gives_it(tmp_path):
    program = tmp_path / "searches.py"
    program.write_text(LINE_SEARCH)
    done = audit("--nproc-per-node", "1", program)
    assert done.stdout == run(program).stdout == "[1.08, 0.6912]\n", done.stderr
