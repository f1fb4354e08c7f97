# SPDX-License-Identifier: Apache-2.0
"""``TorchTrainer(sync="fsdp")``: optimizers in shards on real workers, whole weights everywhere."""

import os

import pytest
from tests.ray.operators import GLOBAL_BATCH, STEPS, DefaultLoop, farthest, net, one_process

from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE


class OwnStep(DefaultLoop):
    def train_batch(self, batch, batch_info):
        features, targets = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(features), targets)
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item()}


def trainer(operator=DefaultLoop, **arguments):
    return TorchTrainer(
        training_operator_cls=operator, config={BATCH_SIZE: GLOBAL_BATCH}, **arguments
    )


def part_of_first_layer(operator):
    momentum = operator.optimizer.state[operator.model.first.weight]["momentum_buffer"]
    return momentum.to_local().numel()


def test_the_weights_of_one_process_and_a_directory_that_goes_on_anywhere(tmp_path):
    # 37 samples in batches of 12: the last batch of an epoch has one sample, for rank 0.
    with trainer(num_workers=3, sync="fsdp") as run:
        run.train(num_steps=STEPS - 4)
        assert run.validate()["num_samples"] == 37
        path = run.save(tmp_path / "state")
        run.train(num_steps=4)
        trained = run.get_model()
        parts = run.apply_all_operators(part_of_first_layer)
    assert type(trained) is type(net())
    assert farthest(trained, one_process()) < 1e-12
    # No rank holds more than its rows of the momentum.
    assert parts == [15, 15, 5]
    assert os.path.isdir(path)
    with trainer(num_shards=3, sync="replicate") as other:
        other.load(path)
        other.train(num_steps=4)
        assert farthest(other.get_model(), trained) < 1e-12


@pytest.mark.slow
def test_a_step_of_ones_own_and_a_file_of_another_sync(tmp_path):
    with trainer(num_shards=2) as alone:
        alone.train(num_steps=STEPS - 4)
        file = alone.save(tmp_path / "file")
    with trainer(OwnStep, num_workers=2, sync="fsdp") as run:
        run.load(file)
        run.train(num_steps=4)
        assert farthest(run.get_model(), one_process()) < 1e-12
