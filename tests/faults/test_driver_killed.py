# SPDX-License-Identifier: Apache-2.0
"""The driver is killed at any moment, and the next one ends where nobody was killed."""

import contextlib
import hashlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer, TrainingOperator, checkpoint
from lockstep.errors import CheckpointWriteError
from lockstep.keys import BATCH_SIZE

STEPS, EVERY = 60, 3


class Wide(TrainingOperator):
    """8 MB with Adam's two moments: writing takes a moment in which one can be killed."""

    def setup(self, config):
        model = nn.Sequential(nn.Linear(10, 1400), nn.Dropout(0.2), nn.Linear(1400, 500))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.parameters(), lr=1e-3),
            criterion=nn.CrossEntropyLoss(),
        )
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(
            torch.randn(104, 10, generator=generator),
            torch.randint(5, (104,), generator=generator),
        )
        self.register_data(train_loader=DataLoader(data, config[BATCH_SIZE], shuffle=True))


def live(folder, pipe):
    """One driver: it goes on from what is there, to the end if it is let."""
    torch.set_num_threads(1)
    with TorchTrainer(
        training_operator_cls=Wide,
        config={BATCH_SIZE: 16},
        num_shards=2,
        checkpoint_dir=folder,
        checkpoint_every=EVERY,
        resume="auto",
    ) as trainer:
        began = trainer.status()["step"]
        while trainer.status()["step"] < STEPS:
            trainer.train(num_steps=min(20, STEPS - trainer.status()["step"]))
        tensors = trainer.get_model().state_dict().values()
        digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors))
    pipe.send((began, digest.hexdigest()))


@contextlib.contextmanager
def process(target, *arguments):
    """Forked from a process that has imported torch, once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.worker", "torch._dynamo"])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(*arguments, theirs))
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        child.close()
        ours.close()


def lives_to_the_end(folder):
    with process(live, folder) as (_, pipe):
        assert pipe.poll(50), "it hangs"
        return pipe.recv()


def is_written(folder):
    return any(folder.glob(".lockstep-*.tmp"))


def killed_when(folder, is_time):
    """Whether a driver was killed at that moment, and not a moment after its end."""
    with process(live, folder) as (child, pipe):
        deadline = time.monotonic() + 50
        while not is_time() and child.is_alive() and not pipe.poll():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        has_ended = pipe.poll()
        child.kill()
        child.join()
        return child.exitcode == -signal.SIGKILL and not has_ended


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    began, digest = lives_to_the_end(tmp_path_factory.mktemp("undisturbed"))
    assert began == 0
    return digest


def test_killed_in_training_and_while_a_checkpoint_is_written(tmp_path, undisturbed):
    assert killed_when(tmp_path, lambda: any(tmp_path.glob("step-*")))
    reached = max(tmp_path.glob("step-*"))
    for _ in range(5):
        assert killed_when(tmp_path, lambda: is_written(tmp_path))
        if is_written(tmp_path):  # it may just have been finished
            break
    assert is_written(tmp_path)
    began, digest = lives_to_the_end(tmp_path)
    assert began >= int(reached.stem.removeprefix("step-")) > 0
    assert digest == undisturbed
    assert not is_written(tmp_path)
    assert checkpoint.read(tmp_path / f"step-{STEPS:010d}.ckpt")["global_step"] == STEPS


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments(tmp_path, undisturbed, seed):
    generator = random.Random(seed)
    for _ in range(5):
        began = time.monotonic()
        moment = generator.uniform(0.2, 2.0)
        killed_when(tmp_path, lambda until=began + moment: time.monotonic() > until)
    _, digest = lives_to_the_end(tmp_path)
    assert digest == undisturbed


def without_rights(folder, pipe):
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        TorchTrainer(training_operator_cls=Wide, checkpoint_dir=folder, checkpoint_every=1)
    except CheckpointWriteError as error:
        pipe.send(str(error))


def test_a_directory_that_may_not_be_written_to_is_refused_before_training():
    """In a process that is not root, for whom every directory may be written to."""
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        folder = Path(parent, "run")
        folder.mkdir(mode=0o555)
        with process(without_rights, folder) as (_, pipe):
            assert pipe.poll(50)
            assert "may not be written to" in pipe.recv()
