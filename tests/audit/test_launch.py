# SPDX-License-Identifier: Apache-2.0
"""`lockstep audit SCRIPT`: the script runs as without us, and the exit code says what was found."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from audit.commands import audit
from lockstep.cli import main

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
BYPASS = HERE / "bugs" / "a_method_of_module.py"


def codes(path):
    return {f["code"] for f in json.loads(path.read_text())["findings"]}


def test_a_bypass_is_reported_with_tables_and_files(tmp_path):
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    done = audit("--json", report, "--html", page, BYPASS)
    assert done.returncode == 65, done.stderr
    assert "LS101" in done.stderr
    assert "gradient of" in done.stderr
    assert "drift" in done.stderr
    held = json.loads(report.read_text())
    assert held["steps"] == 3
    assert held["world_size"] == 2
    (finding,) = [f for f in held["findings"] if f["severity"] == "error"]
    assert finding.keys() >= {"code", "name", "severity", "rank", "step", "parameters"}
    assert finding.keys() >= {"evidence", "where", "message", "fix"}
    assert finding["where"][0].keys() == {"file", "line", "function", "text"}
    text = page.read_text()
    assert "LS101" in text
    assert len(text) < 1_000_000
    assert not any(mark in text for mark in ("<script", "http:", "https:", "url("))


@pytest.mark.slow
def test_the_toy_with_and_without_its_fix(tmp_path):
    """The audit's two tables, from the running script, are those that the script measures."""
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    broken = audit("--json", report, SCRIPTS / "toy.py")
    assert broken.returncode == 65, broken.stderr
    measured = json.loads(broken.stdout)
    (finding,) = [f for f in json.loads(report.read_text())["findings"] if f["code"] == "LS101"]
    rows, drift = finding["evidence"]["gradients"], finding["evidence"]["drift"]
    assert [row["step"] for row in rows] == [row["step"] for row in drift] == [1, 2, 3, 4, 5]
    lines = broken.stderr.splitlines()
    for own, row, apart in zip(measured, rows, drift, strict=True):
        ranks = own["gradients"][row["parameter"]]
        assert [row["values"]["0"], row["values"]["1"]] == pytest.approx(ranks, rel=1e-6)
        assert apart["drift"] == pytest.approx(own["drift"], rel=1e-6)
        shown = f"{row['step']:>6} | {ranks[0]:>11.5f} {ranks[1]:>11.5f} | no"
        assert shown in lines
        assert f"{row['step']:>6} | {own['drift']:>12.6f}" in lines
    assert drift[4]["drift"] > drift[0]["drift"] > 0
    mended = audit("--html", page, SCRIPTS / "toy.py", "--fix")
    assert mended.returncode == 0, mended.stderr
    assert "in lockstep" in mended.stderr
    assert all(own["drift"] == 0.0 for own in json.loads(mended.stdout))
    assert "Gradients and replicas" in page.read_text()


def test_the_script_is_what_it_is_without_us(tmp_path):
    script = SCRIPTS / "leaves_with_7.py"
    report = tmp_path / "report.json"
    done = audit("--json", report, script, "--json", "mine", cwd=tmp_path)
    assert done.returncode == 7
    said = f"{[str(script), '--json', 'mine']} __main__ {script} {tmp_path} {SCRIPTS}"
    assert done.stdout.splitlines() == [said, said]
    assert codes(report) == set()


def test_a_rank_that_is_ended_for_anothers_failure_has_not_died_without_a_word(tmp_path):
    script = tmp_path / "waits_and_fails.py"
    script.write_text(
        "import os, signal, sys\nsys.exit(7) if os.environ['RANK'] == '0' else signal.pause()\n"
    )
    report = tmp_path / "report.json"
    assert audit("--json", report, script, cwd=tmp_path).returncode == 7
    assert codes(report) == set()


@pytest.mark.slow
def test_what_the_script_asks_of_python_and_torch_is_as_without_us(tmp_path):
    for name in ("types.py", "lockstep.py"):
        (tmp_path / name).write_text("raise ImportError('not the module that was meant')")
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = audit(SCRIPTS / "looks_round.py", cwd=tmp_path, env=unbuffered)
    lines = sorted(done.stdout.splitlines())
    # What was printed is there, although rank 1 is killed.
    assert lines == [*(f"before anything else {n}" for n in (0, 1)), "rank 0: []", "rank 1: []"]


def test_what_cannot_be_run_is_refused_before_anything_starts(tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(["audit", "--json", str(report), str(tmp_path / "none.py")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert codes(report) == set()
    assert main(["audit", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert main(["audit", ""]) == 2
    assert "is empty" in capsys.readouterr().err
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f(:\n    pass\n")
    assert main(["audit", str(wrong)]) == 1
    shown = capsys.readouterr().err
    assert "SyntaxError" in shown
    assert "lockstep" not in shown


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--nproc-per-node", "0", "x.py"],
        ["--steps", "many", "x.py"],
        ["--only", "LS999", "x.py"],
        ["--fail-on", "sometimes", "x.py"],
        ["--json", "no/such/folder/x.json", "x.py"],
        ["--unknown", "x.py"],
    ],
)
def test_wrong_usage_is_2(arguments, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["audit", *arguments])
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert "usage:" in said
    assert "required: SCRIPT, ARGS" not in said, "a script need not have any"


def test_the_versions_are_printed(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert f"torch {torch.__version__.partition('+')[0]}" in capsys.readouterr().out


def test_the_help_is_for_terminals(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "``" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "new.json"],
        ["--json=new.json", "--unknown", "x.py"],
        ["--steps", "many", "--json", "new.json", "x.py"],
        ["-m", "--json", "new.json", "--unknown", "x"],
        ["--sarif", "other.sarif", "--json", "new.json", "--junit=no/folder/it.xml", "x.py"],
    ],
)
def test_the_json_is_written_on_wrong_usage_too(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = tmp_path / "new.json"
    new.write_text("of an earlier run")
    with pytest.raises(SystemExit):
        main(["audit", *arguments])
    assert codes(new) == set()


def test_a_file_that_the_script_would_write_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["--steps", "many", "x.py", "--json", "its.json"],
        ["--steps", "many", "--github", "x.py", "--json", "its.json"],
        ["--json"],
    ):
        with pytest.raises(SystemExit):
            main(["audit", *arguments])
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_the_first_failing_ranks_code_and_traceback_are_the_scripts_own(tmp_path):
    report = tmp_path / "report.json"
    done = audit("--json", report, SCRIPTS / "one_rank_dies.py")
    assert done.returncode == 1
    assert "KeyError: 'only rank 1'" in done.stderr
    assert str(HERE.parents[1] / "src" / "lockstep") not in done.stderr
    assert codes(report) == {"LS601"}


@pytest.mark.slow
def test_severities_can_be_chosen():
    assert audit("--fail-on", "never", BYPASS).returncode == 0
    assert audit("--ignore", "LS1", BYPASS).returncode == 0
    assert audit("--only", "LS2", BYPASS).returncode == 0


@pytest.mark.slow
def test_steps_ends_the_watch_and_not_the_script(tmp_path):
    report = tmp_path / "report.json"
    done = audit("--steps", "2", "--json", report, BYPASS)
    assert done.returncode == 65
    assert json.loads(report.read_text())["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "found", "said"),
    [
        ("trains_alone.py", 0, {"LS404"}, "none started a process group"),
        ("own_optimizer.py", 66, {"LS406"}, "are not watched"),
        ("compiled.py", 0, {"LS508"}, "0 errors, 1 warning"),
        ("sets_the_environment_first.py", 0, {"LS405"}, "no optimizer step was seen"),
        ("forgets_its_rank.py", 0, {"LS405"}, "no optimizer step was seen"),
        ("hides_torch.py", 66, {"LS406"}, "was not compared"),
    ],
)
def test_scripts_of_other_kinds(tmp_path, script, code, found, said):
    report = tmp_path / "report.json"
    done = audit("--json", report, SCRIPTS / script)
    assert done.returncode == code, done.stderr
    assert said in " ".join(done.stderr.split())
    assert codes(report) <= found


def test_a_full_disk_is_not_the_scripts_failure(tmp_path):
    script = tmp_path / "trains.py"
    script.write_text(
        "import resource, torch\n"
        "weight = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "weight.sum().backward()\noptimizer.step()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
    )
    done = audit("--nproc-per-node", "1", script)
    assert done.returncode == 66, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_is_ignored_in_the_ranks_too(tmp_path, number):
    """As under `nohup`, and in the background of a shell."""
    script = tmp_path / "hangs_up.py"
    script.write_text(
        f"import os\nos.kill(os.getppid(), {int(number)})\nos.kill(os.getpid(), {int(number)})\n"
        "print('done')\n"
    )
    done = audit(
        "--nproc-per-node", "1", script, preexec_fn=lambda: signal.signal(number, signal.SIG_IGN)
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.slow
def test_a_script_that_closes_all_files_lives(tmp_path):
    script = tmp_path / "closes.py"
    script.write_text(
        "import os, time\nos.closerange(3, 64)\n"
        "others = [open(os.devnull) for _ in range(64)]\ntime.sleep(0.3)\nprint('done')\n"
    )
    done = audit(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_port_is_kept_until_rank_0_listens_on_it(tmp_path):
    script = tmp_path / "port.py"
    script.write_text(
        "import errno, os, socket\n"
        "with socket.socket() as somebody:\n"
        "    try:\n"
        "        somebody.bind(('', int(os.environ['MASTER_PORT'])))\n"
        "    except OSError as error:\n"
        "        assert error.errno == errno.EADDRINUSE\n"
        "        print('kept', flush=True)\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    done = audit(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kept") == 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[], ["--steps", "2"]], ids=["all steps", "two steps"])
@pytest.mark.parametrize(("ignored", "code"), [("LS507", 65), ("LS601", 124)])
def test_a_hang_that_was_named_ends(tmp_path, ignored, code, steps):
    report, started = tmp_path / "report.json", tmp_path / "started"
    script = SCRIPTS / "waits_for_ever.py"
    options = ("--hang-timeout", "1", "--ignore", ignored, "--json", report, *steps)
    environment = {**os.environ, "LOCKSTEP_AUDIT_STALL_S": "1"}
    done = audit(*options, script, started, env=environment)
    assert done.returncode == code, done.stderr
    assert "nothing has moved for 1 s" in done.stderr
    assert "they are ended in 1 s (--hang-timeout)" in done.stderr
    assert "the ranks hang, and are ended" in done.stderr
    assert codes(report) == {"LS601"} - {ignored}


@pytest.mark.slow
def test_a_hang_ends_though_one_rank_has_its_steps_and_is_not_watched_any_more(tmp_path):
    script, started = SCRIPTS / "waits_for_ever.py", tmp_path / "started"
    environment = {**os.environ, "LOCKSTEP_AUDIT_STALL_S": "1"}
    done = audit("--hang-timeout", "1", "--steps", "2", script, started, "steps", env=environment)
    assert "the ranks hang, and are ended" in done.stderr
    assert done.returncode in (65, 124)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    ["one_computes_alone.py", "one_keeps_the_interpreter.py", "one_waits_for_a_child.py"],
)
def test_ranks_that_wait_for_one_that_computes_do_not_hang(script):
    environment = {**os.environ, "LOCKSTEP_AUDIT_STALL_S": "1"}
    done = audit("--hang-timeout", "1", SCRIPTS / script, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "nothing has moved" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_a_hang_says_who_waits_for_whom(tmp_path, number):
    report, started = tmp_path / "report.json", tmp_path / "started"
    script = SCRIPTS / "waits_for_ever.py"
    command = [sys.executable, "-m", "lockstep.cli", "audit", "--json", report, script, started]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = next(
        n for n, text in enumerate(script.read_text().splitlines(), 1) if "dist.all_reduce" in text
    )
    while not started.exists():
        assert running.poll() is None
        os.sched_yield()
    running.send_signal(number)
    _, said = running.communicate(timeout=50)
    assert running.returncode == 128 + number
    (finding,) = json.loads(report.read_text())["findings"]
    assert finding["code"] == "LS601"
    assert finding["rank"] == [1]
    assert line in [place["line"] for place in finding["where"]]
    assert "rank 1 is missing" in " ".join(said.split())
    passed_on = f"lockstep audit: {number.name} passed on to the ranks"
    assert said.count(passed_on) == 1
    assert "the third one kills them" in said


@pytest.mark.slow
def test_under_torchrun_rank_0_reports(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["-m", "lockstep.audit", "--json", report, BYPASS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[LS101]") == 1
    assert codes(report) == {"LS101"}


@pytest.mark.slow
def test_under_torchrun_a_signal_to_a_child_is_the_childs(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["-m", "lockstep.audit", "--json", report, SCRIPTS / "ends_its_children.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    assert codes(report) == set()


@pytest.mark.slow
def test_under_torchrun_what_could_not_be_watched_is_said_and_restarts_nothing(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["-m", "lockstep.audit", "--fail-on", "error", "--json", report]
    command += [SCRIPTS / "hides_torch.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("notice LS406") == 1
    assert codes(report) == {"LS406"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, set()),
        ("raise LookupError", set()),
        ("import os, torch, torch.distributed as dist\nos._exit(0)", {"LS405"}),
    ],
    ids=["no script", "fails before torch", "leaves at once"],
)
def test_the_json_is_written_however_a_rank_of_torchruns_ends(tmp_path, text, found):
    """One process, as a launcher starts rank 0."""
    script, report = tmp_path / "script.py", tmp_path / "report.json"
    report.write_text("of an earlier run")
    if text is not None:
        script.write_text(text)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    subprocess.run(
        [sys.executable, "-m", "lockstep.audit", "--json", report, script],
        env={**os.environ, **rank},
        stderr=subprocess.DEVNULL,
        timeout=55,
        check=False,
    )
    assert codes(report) == found
