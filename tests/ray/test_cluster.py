# SPDX-License-Identifier: Apache-2.0
"""Which Ray a trainer joins, and which it leaves alone."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.ray_variables import without_ray_variables

import ray

CONNECTS = """
import ray
from lockstep.engine.cluster import connect
print(connect(), connect(), ray.get_runtime_context().gcs_address)
"""


@pytest.mark.slow
def test_another_programs_private_ray_is_left_alone():
    """The session's Ray runs beside it, and was offered to nobody."""
    # Short: Ray puts sockets below it, whose paths may not exceed about 100 characters.
    folder = tempfile.mkdtemp(prefix="ls")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", CONNECTS], env=environment, capture_output=True, text=True
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    first, second, address = done.stdout.split()
    assert (first, second) == ("True", "True")  # its own, also when it is asked again
    assert address != ray.get_runtime_context().gcs_address


def test_a_ray_that_cannot_start_is_an_error_that_says_what_to_type(tmp_path):
    # A socket's path may not exceed about 100 characters.
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    environment = without_ray_variables() | {
        "RAY_TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    program = "from lockstep.engine.cluster import connect; connect()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    error = done.stderr.rpartition("lockstep.errors.")[2]
    assert error.startswith("NotAvailableError: "), done.stderr
    assert "Ray did not start on this machine" in error
    assert "AF_UNIX path length" in error
    assert "ray start --head" in error
    assert f"{folder}/ray/session_latest/logs" in error


LEAVES_NOTHING = """
import os, pathlib
import ray
from lockstep.engine.cluster import connect
connect()
print(ray.get(ray.remote(lambda: "a task ran").remote()))
ray.shutdown()
connect()
print(ray.get(ray.remote(lambda: "and another").remote()))
print([str(path) for path in pathlib.Path.home().rglob("*")])
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_ray_of_its_own_leaves_no_token_in_the_home_directory(tmp_path):
    """Every other cluster of this user would ask for it from then on."""
    folder = tempfile.mkdtemp(prefix="ls")
    path = os.pathsep.join(sys.path)
    environment = without_ray_variables() | {
        "RAY_TMPDIR": folder,
        "PYTHONPATH": path,
        "HOME": str(tmp_path),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", LEAVES_NOTHING], env=environment, capture_output=True, text=True
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.stdout.splitlines() == ["a task ran", "and another", "[]"], done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_ray_of_the_tests_leaves_no_token_in_the_home_directory(tmp_path):
    """A plain `ray.init()`, as in tests/ray/conftest.py, would."""
    folder = tempfile.mkdtemp(prefix="ls")
    environment = without_ray_variables() | {"RAY_TMPDIR": folder, "HOME": str(tmp_path)}
    one = f"{Path(__file__).with_name('test_tune.py')}::test_what_a_trial_asks_for"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", one]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / ".ray").exists()


CHANGES_NOTHING = """
import json, os, pathlib, random, signal, sys, threading, warnings
import numpy, ray, torch
import lockstep
from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE
from tests.ray.operators import GLOBAL_BATCH, DefaultLoop
# What these set when they are imported is theirs: torch's compiler comes with an optimizer.
import aiohttp.web, torch._dynamo

def mine(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, mine)

def found():
    folders = pathlib.Path.home(), pathlib.Path(os.environ["TMPDIR"])
    return {
        "environment": dict(os.environ),
        "signals": {each.name: repr(signal.getsignal(each)) for each in signal.valid_signals()
                    if isinstance(each, signal.Signals)},
        "warnings": [repr(each) for each in warnings.filters],
        "hooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.breakpointhook)],
        "path": list(sys.path),
        "files": sorted(str(path) for folder in folders for path in folder.rglob("*")),
        "folder": os.getcwd(),
        "torch": [
            torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
            torch.get_default_dtype().__str__(), torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled,
            torch.distributed.is_initialized(), torch.initial_seed(),
        ],
        "drawn": [torch.get_rng_state().sum().item(), hash(random.getstate()),
                  int(numpy.random.get_state()[1].sum())],
    }

arguments = {"training_operator_cls": DefaultLoop, "config": {BATCH_SIZE: GLOBAL_BATCH}}
before = found()
for kind in ({"num_workers": 2}, {"reproducible": True, "num_shards": 2}):
    folder = sys.argv[1] + "/" + str(len(kind))
    with TorchTrainer(**arguments, **kind, checkpoint_dir=folder, checkpoint_every=2) as trainer:
        trainer.train(), trainer.validate(), trainer.verify()
after = found()
changed = [name for name in before if before[name] != after[name]]
print(json.dumps({name: [before[name], after[name]] for name in changed}))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_trainers_life_leaves_the_process_and_the_folders_as_they_were(tmp_path):
    folder = tempfile.mkdtemp(prefix="ls")
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir(), temporary.mkdir()
    path = os.pathsep.join([os.getcwd(), *sys.path])
    environment = without_ray_variables() | {"RAY_TMPDIR": folder, "PYTHONPATH": path}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHANGES_NOTHING, str(tmp_path / "run")],
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


JOINS = "import ray; ray.init('auto'); print(ray.get(ray.remote(lambda: 'a task ran').remote()))"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_peoples_ray_is_as_it_was_after_an_example(tmp_path):
    """Nothing that other programs read; `ray start --head`, and a plain program that joins."""
    folder = tempfile.mkdtemp(prefix="ls")
    environment = without_ray_variables() | {
        "RAY_TMPDIR": folder,
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ray_command = os.path.join(os.path.dirname(sys.executable), "ray")
    asked = {"env": environment, "capture_output": True, "text": True}
    try:
        trained = subprocess.run([sys.executable, "examples/digits.py"], **asked)
        assert trained.returncode == 0, trained.stderr
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        start = [ray_command, "start", "--head", "--port=0", "--num-cpus=1", "--block"]
        head = subprocess.Popen(
            [*start, "--include-dashboard=false"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with head:
            try:
                assert any("block" in line for line in head.stdout)
                joined = subprocess.run([sys.executable, "-c", JOINS], **asked)
            finally:
                head.terminate()  # and not `ray stop`, which ends everybody's
        assert joined.stdout.splitlines() == ["a task ran"], joined.stderr
    finally:
        shutil.rmtree(folder, ignore_errors=True)


THROUGH_A_CLIENT = """
import socket, subprocess, sys, ray
from ray.cluster_utils import Cluster
from ray.util.client.server.server import init_and_serve, shutdown_with_server
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
head = {"num_cpus": 1, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
# The head's own server starts one more for each client, which a busy machine starts too late.
server = init_and_serve("127.0.0.1", port, address=cluster.address)
program = f"address = 'ray://127.0.0.1:{port}'" + '''
import ray
from lockstep.engine.cluster import connect
ray.init(address)
connect()
'''
try:
    sys.exit(subprocess.run([sys.executable, "-c", program]).returncode)
finally:
    shutdown_with_server(server.grpc_server)
    cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_program_outside_of_the_cluster_is_told_to_submit_a_job():
    folder = tempfile.mkdtemp(prefix="ls")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", THROUGH_A_CLIENT],
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 1
    assert "[LS003] a trainer cannot train through Ray Client" in done.stderr, done.stdout
    assert "ray job submit" in done.stderr
