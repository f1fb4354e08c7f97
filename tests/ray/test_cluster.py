# SPDX-License-Identifier: Apache-2.0
"""Which Ray a trainer joins, and which it leaves alone."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest

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
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = os.pathsep.join(sys.path)
    environment = kept | {"RAY_TMPDIR": folder, "PYTHONPATH": path, "HOME": str(tmp_path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", LEAVES_NOTHING], env=environment, capture_output=True, text=True
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.stdout.splitlines() == ["a task ran", "and another", "[]"], done.stderr


THROUGH_A_CLIENT = """
import socket, subprocess, sys
from ray.cluster_utils import Cluster
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
head = {"num_cpus": 1, "include_dashboard": False, "ray_client_server_port": port}
cluster = Cluster(initialize_head=True, head_node_args=head)
program = f"address = 'ray://127.0.0.1:{port}'" + '''
import os, pathlib, ray
from lockstep.engine.cluster import connect
for _ in range(3):
    try:
        ray.init(address)
        break
    except (ConnectionError, RuntimeError) as error:
        # What Ray starts for this client alone can end as it starts, on a busy machine.
        print(error)
        for log in pathlib.Path(os.environ["RAY_TMPDIR"]).rglob("ray_client_server*"):
            print(log.name, log.read_text())
        ray.shutdown()
connect()
'''
try:
    sys.exit(subprocess.run([sys.executable, "-c", program]).returncode)
finally:
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
