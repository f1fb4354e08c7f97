# SPDX-License-Identifier: Apache-2.0
"""`predict` on several workers: every sample once, in order, whatever keeps them in step."""

import pytest
import torch
from tests.ray.operators import DefaultLoop, problem
from tests.ray.surface_operators import OwnWrapper
from torch.utils.data import DataLoader, TensorDataset

from lockstep import TorchTrainer
from lockstep.keys import BATCH_SIZE


class Predicts(DefaultLoop):
    def predict_batch(self, batch, batch_info):
        if batch[0].isnan().any():
            raise LookupError(f"not a number on rank {self.world_rank}")
        return {"rank": [self.world_rank] * len(batch[0]), "out": super().predict_batch(batch, {})}


def start(operator=Predicts, **arguments):
    arguments = {"num_workers": 2, "config": {BATCH_SIZE: 12}, **arguments}
    return TorchTrainer(training_operator_cls=operator, **arguments)


def loader(samples=37, **arguments):
    # 37 samples in batches of 2 and 12: in the last one there is nothing for rank 1.
    return DataLoader(TensorDataset(problem()[0][:samples]), 6, **arguments)


def check(two, samples=37):
    features = problem()[0][:samples]
    outputs = two.predict(loader(samples, shuffle=True))
    with torch.no_grad():
        expected = two.get_model()(features)
    assert torch.allclose(torch.stack([each["out"] for each in outputs]), expected, rtol=1e-12)
    return outputs


def test_two_workers_share_the_samples_and_the_run_goes_on():
    with start() as two:
        two.train()
        outputs = check(two)
        assert {each["rank"] for each in outputs} == {0, 1}
        check(two, samples=1)
        broken = TensorDataset(torch.full((5, 5), torch.nan, dtype=torch.float64))
        with pytest.raises(LookupError, match="on rank"):
            two.predict(DataLoader(broken, 2))
        assert two.train()["epoch"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ddp", "fsdp", "parameter_server", "data_parallel"])
def test_under_every_way_to_synchronise(sync):
    with start(sync=sync) as two:
        two.train()
        check(two)
        two.train()
        check(two)


@pytest.mark.slow
def test_a_wrapper_of_the_users_own():
    with start(OwnWrapper, wrap_ddp=False) as two:
        two.train()
        with torch.no_grad():
            expected = two.get_model()(problem()[0])
        labelled = DataLoader(TensorDataset(*problem()), 6)
        assert torch.allclose(torch.stack(two.predict(labelled)), expected, rtol=1e-12)


@pytest.mark.slow
def test_three_workers_and_rank_0_here():
    with start(num_workers=3, num_shards=5, use_local=True) as three:
        check(three)
