# SPDX-License-Identifier: Apache-2.0
"""What docs/security.md says of the ports that a trainer opens on one machine."""

import os

import pytest
from tests.ray.operators import DefaultLoop

from listening import listens
from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE


def start(**arguments):
    return TorchTrainer(
        training_operator_cls=DefaultLoop, num_workers=2, config={BATCH_SIZE: 12}, **arguments
    )


def opened(within, afterwards):
    """The addresses on which a process listens for a trainer, and not for Ray."""
    return [
        {address for address, _ in now - after}
        for now, after in zip(within, afterwards, strict=True)
    ]


def test_a_trainer_on_one_machine_listens_on_loopback_alone():
    with start() as trainer:
        trainer.train(num_steps=1)
        # The kept workers' processes and this one's live on, and so can be asked again.
        pids = [*trainer.apply_all_workers(os.getpid), os.getpid()]
        within = [listens(pid) for pid in pids]
    assert opened(within, map(listens, pids)) == [{"127.0.0.1"}] * 3


@pytest.mark.slow
def test_so_does_a_parameter_server():
    with start(sync="parameter_server") as trainer:
        trainer.train(num_steps=1)
        server = trainer._workers._engine.workers.server
        assert (server.address.host, server.address.port) in listens(server.pid)
        assert server.address.host == "127.0.0.1"
