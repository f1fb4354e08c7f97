# SPDX-License-Identifier: Apache-2.0
"""What goes wrong arrives as itself, at once, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from tests.ray.operators import DefaultLoop
from torch import nn

import ray
from lockstep import TorchTrainer, TrainingOperator
from lockstep.errors import (
    NonFiniteError,
    NotEnoughResourcesError,
    NotPicklableError,
    PeerLostError,
    WorkerDiedError,
    WorkerFailedError,
)
from lockstep.keys import BATCH_SIZE

OTHERS = [
    pytest.param(sync, marks=pytest.mark.slow) for sync in ("ddp", "fsdp", "parameter_server")
]

CONFIG = {BATCH_SIZE: 12}


class OwnError(Exception):
    """With a constructor of its own, as users' exceptions have."""

    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self):
        return OwnError, (self.code,)


class Unpicklable(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class Misbehaving(DefaultLoop):
    """Does what `config` says when rank 1 computes its loss."""

    def compute_loss(self, batch, batch_info):
        if self.world_rank == 1 and batch_info["global_step"] == self.config.get("at", 2):
            self.config["what"]()
        return super().compute_loss(batch, batch_info)


def raise_own():
    raise OwnError(7)


def raise_unpicklable():
    raise Unpicklable("mutex inside")


def exit_process():
    os._exit(3)


def start(operator=DefaultLoop, num_workers=3, **config):
    return TorchTrainer(
        training_operator_cls=operator, num_workers=num_workers, config={**CONFIG, **config}
    )


@pytest.mark.other_workers
def test_a_users_exception_arrives_as_itself_with_rank_and_traceback():
    with start(Misbehaving, what=raise_own) as trainer:
        pids = trainer.apply_all_workers(os.getpid)
        begin = time.monotonic()
        with pytest.raises(OwnError) as caught:
            trainer.train()
        assert time.monotonic() - begin < 40  # nobody waited for the 1800 s of the group
    assert type(caught.value) is OwnError
    assert caught.value.code == 7
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1" in notes
    assert "raise_own" in notes
    assert not any(map(_alive, pids))  # and nobody is left in the middle of the step


@pytest.mark.slow
def test_an_exception_that_cannot_travel_is_shown():
    with (
        start(Misbehaving, num_workers=2, what=raise_unpicklable) as trainer,
        pytest.raises(WorkerFailedError, match="Unpicklable") as caught,
    ):
        trainer.train()
    assert "mutex inside" in str(caught.value)
    assert "raise_unpicklable" in "\n".join(caught.value.__notes__)


@pytest.mark.slow
def test_a_death_that_may_not_be_recovered_from_is_named():
    trainer = start(Misbehaving, what=exit_process)
    pids = trainer.apply_all_workers(os.getpid)
    with pytest.raises(WorkerDiedError, match="rank 1") as caught:
        trainer.train(max_retries=0)
    assert any("train(max_retries=...)" in note for note in caught.value.__notes__)
    assert not any(map(_alive, pids))


class SetupFails(TrainingOperator):
    def setup(self, config):
        if self.world_rank == 1:
            raise OwnError(1)
        model = nn.Linear(2, 2)
        self.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=1))


@pytest.mark.other_workers
def test_an_exception_in_setup_arrives_and_frees_the_others():
    begin = time.monotonic()
    with pytest.raises(OwnError) as caught:
        start(SetupFails)
    assert time.monotonic() - begin < 40
    assert "rank 1" in "\n".join(caught.value.__notes__)


@pytest.mark.slow
def test_an_exception_of_an_applied_function_leaves_the_trainer_usable():
    with start(num_workers=2) as trainer:
        with pytest.raises(OwnError):
            trainer.apply_all_operators(_fail_on_rank_0)
        with pytest.raises(NotPicklableError, match="returned"):
            trainer.apply_all_workers(threading.Lock)
        with pytest.raises(NotPicklableError, match=r"rank [01]\n.*BadFile"):
            trainer.apply_all_workers(_return_what_cannot_be_rebuilt)
        assert trainer.train()["num_samples"] == 37


class BadFile(Exception):
    """As many are written: pickle gives its one argument to an `__init__` that takes two."""

    def __init__(self, path, why):
        super().__init__(f"{path}: {why}")


def _return_what_cannot_be_rebuilt():
    return BadFile("a.txt", "empty")


@pytest.mark.slow
def test_a_function_that_cannot_travel_leaves_the_workers_beside_the_driver():
    lock = threading.Lock()
    with TorchTrainer(
        training_operator_cls=DefaultLoop, num_workers=2, config=CONFIG, use_local=True
    ) as trainer:
        with pytest.raises(NotPicklableError):
            trainer.apply_all_operators(lambda operator: lock.locked())
        assert trainer.train()["num_samples"] == 37


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_worker_that_does_not_come_to_the_one_in_the_driver_is_named():
    """As where its hook downloads something, or waits for a lock."""
    driver = os.getpid()

    def hang_elsewhere():
        if os.getpid() != driver:
            threading.Event().wait()

    arguments = {"num_workers": 2, "use_local": True, "timeout_s": 1}
    with pytest.raises(PeerLostError, match=r"rank 1 did not come(.|\n)*initialization_hook"):
        TorchTrainer(
            training_operator_cls=DefaultLoop,
            config=CONFIG,
            initialization_hook=hang_elsewhere,
            **arguments,
        )


def _fail_on_rank_0(operator):
    if operator.world_rank == 0:
        raise OwnError(0)


def test_what_cannot_travel_is_named_before_anything_starts():
    with pytest.raises(NotPicklableError, match="config\\['lock'\\]"):
        start(num_workers=2, lock=threading.Lock())
    lock = threading.Lock()
    with pytest.raises(NotPicklableError, match="initialization_hook"):
        TorchTrainer(
            training_operator_cls=DefaultLoop,
            num_workers=2,
            config=CONFIG,
            initialization_hook=lambda: lock.acquire(),
        )


def test_not_enough_resources_says_what_there_is(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_START_TIMEOUT_S", "1")
    with pytest.raises(NotEnoughResourcesError) as caught:
        start(num_workers=5)
    message = str(caught.value)
    assert "5 CPU" in message
    assert "4 of 4 CPU" in message
    groups = ray.util.placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups)


@pytest.mark.other_workers
@pytest.mark.usefixtures("workers_end_with_their_trainer")
def test_shutdown_ends_everything_and_later_calls_say_so():
    trainer = start(num_workers=2)
    pids = trainer.apply_all_workers(os.getpid)
    trainer.shutdown()
    assert not any(map(_alive, pids))
    for call in (trainer.train, trainer.validate, trainer.get_model, trainer.get_local_operator):
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    trainer.shutdown()  # harmless


INTERRUPTED = """
    import os, sys
    from lockstep import TorchTrainer
    from tests.ray.test_failures import Slow, CONFIG
    trainer = TorchTrainer(
        training_operator_cls=Slow, num_workers=2, config={**CONFIG, "inside": sys.argv[1]}
    )
    print(*trainer.apply_all_workers(os.getpid), flush=True)
    try:
        trainer.train()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    trainer.shutdown()
    print("over", flush=True)
"""


class Slow(DefaultLoop):
    def compute_loss(self, batch, batch_info):
        with open(self.config["inside"], "w") as pipe:
            pipe.write(".")
        threading.Event().wait(600)


@pytest.mark.slow
def test_ctrl_c_in_an_epoch_comes_back_without_orphans(tmp_path):
    """Also where a worker is in a call that takes long: nobody waits for it."""
    inside = tmp_path / "inside"
    os.mkfifo(inside)
    address = ray.get_runtime_context().gcs_address
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(inside)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(_alive, pids))
    # Held open to the end: a worker that comes later must find a reader, too.
    pipe = os.open(inside, os.O_RDWR)
    assert os.read(pipe, 1) == b"."
    program.send_signal(signal.SIGINT)
    assert program.stdout.readline() == "interrupted\n"
    assert program.stdout.readline() == "over\n"
    assert not any(map(_alive, pids))
    program.communicate(timeout=30)
    os.close(pipe)
    assert program.returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("workers_end_with_their_trainer")
def test_ctrl_c_while_a_worker_is_waited_for_leaves_nothing():
    """A worker that does not answer is waited for at the end; nobody closes a second time."""
    trainer = TorchTrainer(training_operator_cls=DefaultLoop, num_workers=2, config=CONFIG)
    pids = trainer.apply_all_workers(os.getpid)
    os.kill(pids[1], signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        trainer.shutdown()
    assert not any(map(_alive, pids))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


ENDED_BY_THE_USER = """
    import logging
    import ray
    from lockstep import TorchTrainer
    from tests.ray.operators import DefaultLoop
    from tests.ray.test_failures import CONFIG
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    with TorchTrainer(training_operator_cls=DefaultLoop, num_workers=2, config=CONFIG) as trainer:
        ray.shutdown()
        for _ in range(2):
            try:
                trainer.train()
            except RuntimeError as error:
                print(type(error).__name__, "Ray was shut down" in str(error))
    print(ray.is_initialized())
"""


@pytest.mark.slow
def test_a_ray_that_the_user_shut_down_is_named_and_not_started_again():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ENDED_BY_THE_USER)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.split() == ["WorkerDiedError", "True", "TrainerClosedError", "True", "False"]


class NotFinite(DefaultLoop):
    def compute_loss(self, batch, batch_info):
        loss = super().compute_loss(batch, batch_info)
        is_it = self.world_rank == 1 and batch_info["global_step"] == 2
        return loss * float("nan") if is_it else loss


@pytest.mark.parametrize("sync", ["replicate", *OTHERS])
def test_a_loss_that_is_not_finite_is_named_with_its_rank_under_every_sync(sync):
    with (
        TorchTrainer(
            training_operator_cls=NotFinite, num_workers=2, config=CONFIG, sync=sync, timeout_s=60
        ) as trainer,
        pytest.raises(NonFiniteError) as caught,
    ):
        trainer.train(num_steps=4)
    assert "step 3" in str(caught.value)  # that of `lockstep replay --step 3`
    assert "samples on rank 1 (dataset[" in str(caught.value)
    assert "the loss is nan" in str(caught.value)
