# SPDX-License-Identifier: Apache-2.0
"""What docs/how-to/cluster.md says, on a cluster of two nodes: jobs, a death, a stop, tokens."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.ray_variables import without_ray_variables

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "cluster.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PLACES = {"http://head-node:8265", "/mnt/shared/digits"}
"""What a reader replaces by his own."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class LocalCluster:
    """Two nodes of one CPU each, with a token, in a Ray folder of their own."""

    def __init__(self, folder):
        # Short: Ray puts sockets below it, whose paths may not exceed about 100 characters.
        self.ray_folder = Path(tempfile.mkdtemp(prefix="ls"))
        token = self.ray_folder / "token"
        self.stranger = {
            **without_ray_variables(),
            "RAY_TMPDIR": str(self.ray_folder),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self.environment = {
            **self.stranger,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }
        # As docs/security.md says; Ray keeps a copy at home.
        make_token = [str(Path(sys.executable).with_name("ray")), "get-auth-token", "--generate"]
        with token.open("w") as file:
            home = {"HOME": str(self.ray_folder)}
            subprocess.run(make_token, env=self.stranger | home, stdout=file, check=True)
        self.folder = folder
        with (folder / "cluster.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("a_cluster.py"))],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        line = self._process.stdout.readline()
        if not line:
            self.close()
            pytest.fail((folder / "cluster.log").read_text()[-3000:])
        self.gcs, self.dashboard = json.loads(line).values()

    def wait_until_jobs_are_taken(self):
        """The dashboard is there before it has heard of the agent that starts jobs."""
        deadline = time.monotonic() + 60
        while True:
            done = self.run("ray", "job", "submit", "--address", self.dashboard, "--", "true")
            if done.returncode == 0:
                return
            assert "No available agent" in done.stdout, done.stdout
            assert time.monotonic() < deadline

    def order(self, what):
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def close(self):
        self._process.communicate()
        shutil.rmtree(self.ray_folder, ignore_errors=True)

    def run(self, *command, environment=None):
        return subprocess.run(
            command,
            env=environment or self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    there = LocalCluster(tmp_path_factory.mktemp("cluster"))
    try:
        there.wait_until_jobs_are_taken()
        yield there
    finally:
        there.close()


@pytest.fixture
def page(cluster, tmp_path):
    """The page's files in a folder, and its commands, with the places of this cluster."""
    assert all(place in PAGE for place in PLACES)
    text = PAGE.replace("http://head-node:8265", cluster.dashboard)
    text = text.replace("/mnt/shared/digits", str(tmp_path / "checkpoints"))
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("digits.py", "small_digits.py"):
        shutil.copy(ROOT / "examples" / name, folder)
    commands = []
    for language, body in BLOCK.findall(text):
        if language == "bash":
            commands.append(body)
        else:
            name = body.splitlines()[0].removeprefix("# ")
            assert (folder / name).suffix in (".py", ".yaml"), "a block begins with its file's name"
            (folder / name).write_text(body)
    cluster.folder = folder
    (submission,) = commands
    return submission


def set_variable(cluster, name, value):
    file = cluster.folder / "runtime_env.yaml"
    text = re.sub(rf"^  {name}: .*\n", "", file.read_text(), flags=re.MULTILINE)
    file.write_text(text.replace("env_vars:\n", f'env_vars:\n  {name}: "{value}"\n'))


@contextmanager
def submitted(cluster, submission, job):
    """The job's output as it comes."""
    command = submission.replace("--submission-id digits", f"--submission-id {job}")
    process = subprocess.Popen(
        ["bash", "-ec", command],
        env=cluster.environment,
        cwd=cluster.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        yield process


def read_until(process, text, times=1):
    """What a job has said until a line with `text` has come."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        times -= text in line
        if times == 0:
            return seen
    raise AssertionError("".join(seen))


ENDLESS = "100000"
"""Epochs: what a job says arrives some seconds late, and it has to be at work still."""


def stop(cluster, name, job):
    """End a job as a cluster does that needs the room; the rest of what it has said."""
    stopped = cluster.run("ray", "job", "stop", name, "--address", cluster.dashboard)
    output = job.stdout.read()
    assert stopped.returncode == 0, stopped.stdout
    assert "stopped" in stopped.stdout
    return output


def gone_on_with(cluster, page, name):
    """What a further job says that trains two epochs more and comes to its end."""
    saved = sorted((cluster.folder.parent / "checkpoints").glob("step-*.ckpt"))
    steps = int(re.search(r"(\d+)", saved[-1].name)[1])
    set_variable(cluster, "EPOCHS", str(steps // 24 + 2))
    with submitted(cluster, page, name) as job:
        output = job.stdout.read()
    assert job.returncode == 0, output
    assert output.count("loss ") == 2
    return output


def test_a_node_dies_under_a_job_and_the_job_goes_on(cluster, page):
    set_variable(cluster, "EPOCHS", ENDLESS)
    with submitted(cluster, page, "one") as job:
        read_until(job, "loss ", times=3)
        cluster.order("kill")
        try:
            *_, recovered = read_until(job, "recovered in ")
            read_until(job, "loss ", times=2)
            stop(cluster, "one", job)
        finally:
            cluster.order("add")
    assert "none lost; generation 1 has 1 worker;" in recovered
    output = gone_on_with(cluster, page, "one-again")
    assert float(re.search(r"accuracy ([\d.]+)%", output)[1]) > 90


def test_a_job_that_is_stopped_goes_on_when_it_is_submitted_again(cluster, page):
    set_variable(cluster, "EPOCHS", ENDLESS)
    with submitted(cluster, page, "two") as job:
        read_until(job, "loss ", times=3)
        stop(cluster, "two", job)
    assert "accuracy" in gone_on_with(cluster, page, "three")


def test_a_program_that_joins_by_hand(cluster, page):
    done = cluster.run(sys.executable, "by_hand.py")
    assert done.returncode == 0, done.stdout
    assert re.search(r"loss \d", done.stdout)


def test_who_has_no_token_gets_in_nowhere(cluster, page):
    named = {**cluster.stranger, "RAY_ADDRESS": cluster.gcs, "CHECKPOINTS": "c"}
    joins = cluster.run(sys.executable, "train.py", environment=named)
    assert joins.returncode != 0
    assert "RAY_AUTH_MODE=token" in joins.stdout
    submits = cluster.run("bash", "-ec", page, environment=cluster.stranger)
    assert submits.returncode != 0
    assert "token" in submits.stdout.lower()
