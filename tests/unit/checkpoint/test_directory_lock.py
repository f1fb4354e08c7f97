# SPDX-License-Identifier: Apache-2.0
"""One program at a time has a directory, until it lets it go or ends."""

import os
import signal
import subprocess
import sys

import pytest
from tests.unit.trainer.programs import trainer

from lockstep import checkpoint
from lockstep.checkpoint.directory_lock import lock_directory
from lockstep.errors import ConfigurationError

LOCKS = """
import sys
from lockstep.checkpoint.directory_lock import lock_directory
lock = lock_directory(sys.argv[1])
"""


def locks_in_another_process(folder):
    done = subprocess.run([sys.executable, "-c", LOCKS, folder], capture_output=True, text=True)
    assert done.returncode == 0 or "another program trains in checkpoint_dir" in done.stderr
    return done.returncode == 0


def test_a_second_program_is_refused_until_the_first_lets_go(tmp_path):
    lock = lock_directory(str(tmp_path))
    assert not locks_in_another_process(tmp_path)
    del lock
    assert locks_in_another_process(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_trainers_of_one_process_share_it_by_whatever_path(tmp_path):
    link = tmp_path / "link"
    (tmp_path / "run").mkdir()
    link.symlink_to(tmp_path / "run")
    first = lock_directory(str(tmp_path / "run"))
    second = lock_directory(str(link))
    del first
    assert not locks_in_another_process(tmp_path / "run")
    del second
    assert locks_in_another_process(tmp_path / "run")


def test_of_two_trainers_in_one_directory_the_later_one_has_it(tmp_path):
    first, second = (trainer(checkpoint_dir=tmp_path, checkpoint_every=1) for _ in range(2))
    with first, second:
        first.train(num_steps=1)
        second.train(num_steps=2)
        with pytest.raises(ConfigurationError, match="another trainer of this program"):
            first.train(num_steps=1)
        first.apply_all_operators(lambda operator: None)  # would renew it when it shuts down
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-0000000001.ckpt", "step-0000000002.ckpt"]
    assert len([*tmp_path.glob("set-aside-*")]) == 1


def test_a_trainer_that_has_not_trained_yet_saves_what_it_has_changed(tmp_path):
    arguments = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    with trainer(**arguments) as first:  # as a notebook's cell before it is run again
        first.train(num_steps=1)
        second = trainer(resume="auto", **arguments)
        second.apply_all_operators(lambda operator: operator.optimizer.param_groups[0].update(lr=3))
        second.shutdown()
    (newest,) = tmp_path.glob("step-*")
    assert checkpoint.read(newest)["optimizers"][0]["param_groups"][0]["lr"] == 3


KILLED = """
import os, sys, time
from lockstep.checkpoint.directory_lock import lock_directory
lock = lock_directory(sys.argv[1])
if os.fork() == 0:  # as a DataLoader's worker
    print(os.getpid(), flush=True)
time.sleep(100)
"""


def test_a_killed_program_holds_it_no_longer_though_a_process_that_it_forked_lives(tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    child = int(program.stdout.readline())
    try:
        with pytest.raises(ConfigurationError, match="another program trains") as refused:
            lock_directory(str(tmp_path))
        assert f"fuser {tmp_path}" in str(refused.value)
        program.kill()
        program.wait()
        os.kill(child, 0)  # it lives
        assert lock_directory(str(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)
        program.kill()
        program.wait()
        program.stdout.close()
